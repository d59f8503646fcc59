"""The optimizers that are compared, by name."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from benchmarks.convergence.variants import Variant, VariantAdamW
from zenflow.core.preview import SHARE

Group = Literal["main", "interval", "lookahead", "rule", "selection", "early", "preview", "dtype"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        label: for tables.
        group: the table it is in; main methods run first and at every learning rate.
        baseline: the method that it is compared with.
        config: of ``ZenFlowAdamW``; None is ``torch.optim.AdamW``.
        variant: what the product has no option for.
        bf16: parameters in bfloat16.
        clip: whether the task's gradient clipping holds.
        deepspeed: settings of DeepSpeed's ZenFlow, empty for its plain offload; None: not DeepSpeed.
        tasks: where it is run; the main methods, everywhere.
    """

    name: str
    label: str
    group: Group
    baseline: str = "adamw"
    config: dict[str, Any] | None = None
    variant: Variant = field(default_factory=Variant)
    bf16: bool = False
    clip: bool = True
    deepspeed: dict[str, Any] | None = None
    tasks: str = "AC"

    def runs_on(self, task: str) -> bool:
        return self.group == "main" or task in self.tasks

    @property
    def identity(self) -> dict[str, Any]:
        """What changes what a run computes."""
        return {
            **({} if self.deepspeed is None else {"deepspeed": self.deepspeed}),
            "config": None if self.config is None else {"preview": True, **self.config},
            "variant": {k: v for k, v in asdict(self.variant).items() if v is not None},
            "bf16": self.bf16,
            "clip": self.clip,
        }

    def optimizer(
        self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        """An optimizer for a model's parameters."""
        if self.config is None:
            return torch.optim.AdamW(params, lr, weight_decay=weight_decay, foreach=True)
        config = {"host_threads": 1, **self.config}
        return VariantAdamW(
            params, lr, weight_decay=weight_decay, config=config, variant=self.variant
        )


def _fixed(interval: int, **config: Any) -> dict[str, Any]:
    return {"update_interval": interval, **config}


_PAPER = _fixed(4, update_rule="accumulate", lookahead=False)
_RAMP = ((1, 1), (31, 2), (61, 3), (91, 4))

METHODS = {
    method.name: method
    for method in (
        Method(name="adamw", label="`torch.optim.AdamW`", group="main"),
        Method(name="defaults", label="defaults, S as timed", group="main", config={}),
        Method(
            name="s4",
            label="S=4 throughout, the most that `auto` takes",
            group="main",
            config=_fixed(4),
        ),
        Method(
            name="paper",
            label="the paper's rule: window mean, windows end together, S=4",
            group="main",
            config=_PAPER,
            variant=Variant(together=True),
        ),
        # The interval
        Method(
            name="synchronous",
            tasks="ABC",
            group="interval",
            label="synchronous, S=1",
            config=_fixed(1, overlap_step=False),
        ),
        Method(name="s1", tasks="ABC", group="interval", label="S=1", config=_fixed(1)),
        Method(name="s2", tasks="ABC", group="interval", label="S=2", config=_fixed(2)),
        Method(name="s8", tasks="ABC", group="interval", label="S=8", config=_fixed(8)),
        Method(
            name="ramp",
            group="interval",
            label="S=1, 2, 3, 4, each for 30 steps, then 4",
            config={},
            variant=Variant(trace=_RAMP),
        ),
        # Lookahead
        *(
            Method(
                name=f"s{s}-no-lookahead",
                tasks="ABC" if s == 4 else "AC",
                group="lookahead",
                label=f"S={s}, no lookahead",
                config=_fixed(s, lookahead=False),
            )
            for s in (1, 2, 4, 8)
        ),
        *(
            Method(
                name=f"s4-delay-{delay:g}",
                group="lookahead",
                label=f"S=4, lookahead of {delay:g} instead of 2.5 steps",
                config=_fixed(4),
                variant=Variant(delay=delay),
            )
            for delay in (1.0, 2.0, 3.0, 4.0)
        ),
        *(
            Method(
                name=f"s{s}-momentum",
                group="lookahead",
                label=f"S={s}, lookahead by what momentum has decided",
                config=_fixed(s),
                variant=Variant(momentum=True),
            )
            for s in (1, 4, 8)
        ),
        # Windows and rule
        Method(
            name="s4-together",
            tasks="ABC",
            group="rule",
            label="S=4, windows end together",
            config=_fixed(4),
            variant=Variant(together=True),
        ),
        Method(
            name="s4-together-no-lookahead",
            group="rule",
            label="S=4, windows end together, no lookahead",
            config=_fixed(4, lookahead=False),
            variant=Variant(together=True),
        ),
        Method(
            name="accumulate-s4",
            tasks="ABC",
            group="rule",
            label="window mean (`accumulate`), staggered, lookahead, S=4",
            config=_fixed(4, update_rule="accumulate"),
        ),
        # Selection
        *(
            Method(
                name=f"s{s}-k{round(100 * k)}",
                tasks="ABC" if s == 4 else "AC",
                group="selection",
                label=f"S={s}, topk_ratio {k:g}",
                config=_fixed(s, topk_ratio=k),
            )
            for s in (4, 8)
            for k in (0.0, 0.01, 0.05, 0.2)
        ),
        *(
            Method(
                name=f"s4-select-{interval}",
                group="selection",
                label=f"S=4, scored every {interval} steps",
                config=_fixed(4, select_interval=interval),
            )
            for interval in (1, 4, 64)
        ),
        Method(
            name="s4-select-once",
            tasks="ABC",
            group="selection",
            label="S=4, the first gradient's choice for ever",
            config=_fixed(4, select_interval=1_000_000),
        ),
        *(
            Method(
                name=f"s4-{score}" + ("" if preview else "-no-preview"),
                group="selection",
                label=f"S=4, chosen {words}" + ("" if preview else ", no previews"),
                config=_fixed(4, preview=preview),
                variant=Variant(score=score),
            )
            for score, words in (
                ("smoothed", "by a norm averaged over steps"),
                ("gain", "by what lateness loses, to first order"),
                ("random", "at random"),
            )
            for preview in (True, False)
        ),
        # Early training
        *(
            Method(
                name=f"s4-warm-up-{rounds}",
                group="early",
                label=f"S=4, full_warm_up_rounds {rounds}",
                config=_fixed(4, full_warm_up_rounds=rounds),
            )
            for rounds in (10, 20, 50, 100)
        ),
        Method(
            name="s4-warm-up-20-momentum",
            group="early",
            label="S=4, full_warm_up_rounds 20, lookahead by what momentum has decided",
            config=_fixed(4, full_warm_up_rounds=20),
            variant=Variant(momentum=True),
        ),
        Method(
            name="s1-warm-up-20",
            group="early",
            label="S=1, full_warm_up_rounds 20",
            config=_fixed(1, full_warm_up_rounds=20),
        ),
        # Previews
        *(
            Method(
                name=f"s{s}-no-preview",
                tasks="ABC" if s == 4 else "AC",
                group="preview",
                label=f"S={s}, no previews",
                config=_fixed(s, preview=False),
            )
            for s in (1, 2, 4, 8)
        ),
        Method(
            name="s4-no-preview-no-lookahead",
            group="preview",
            label="S=4, no previews, no lookahead",
            config=_fixed(4, preview=False, lookahead=False),
        ),
        Method(
            name="s4-k0-no-preview",
            group="preview",
            label="S=4, topk_ratio 0, no previews",
            config=_fixed(4, preview=False, topk_ratio=0.0),
        ),
        *(
            Method(
                name=f"s{s}-share-{share:g}",
                group="preview",
                label=f"S={s}, {share:g} of each gradient's update shown instead of {SHARE:g}",
                config=_fixed(s),
                variant=Variant(share=share),
            )
            for s in (4, 8)
            for share in (0.1, 0.2, 0.5, 1.0)
        ),
        # Clipping and dtype
        Method(
            name="adamw-no-clip",
            group="dtype",
            label="`torch.optim.AdamW`, no clipping",
            clip=False,
        ),
        Method(
            name="s4-no-clip",
            group="dtype",
            baseline="adamw-no-clip",
            label="S=4, no clipping",
            config=_fixed(4),
            clip=False,
        ),
        Method(
            name="bf16-synchronous",
            tasks="ABC",
            group="dtype",
            label="bf16 weights, synchronous, S=1 (AdamW with fp32 masters)",
            config=_fixed(1, overlap_step=False),
            bf16=True,
        ),
        Method(
            name="bf16-paper",
            group="dtype",
            baseline="bf16-synchronous",
            label="bf16 weights, the paper's rule, S=4",
            config=_PAPER,
            variant=Variant(together=True),
            bf16=True,
        ),
        Method(
            name="deepspeed-zenflow",
            tasks="A",
            group="dtype",
            baseline="bf16-synchronous",
            label="bf16 weights, DeepSpeed 0.19.6 ZenFlow, S=4, overlapped",
            deepspeed={
                "topk_ratio": 0.1,
                "select_strategy": "step",
                "select_interval": 16,
                "update_interval": 4,
                "overlap_step": True,
                "full_warm_up_rounds": 0,
            },
            bf16=True,
        ),
        Method(
            name="deepspeed-offload",
            tasks="A",
            group="dtype",
            baseline="bf16-synchronous",
            label="bf16 weights, DeepSpeed 0.19.6 ZeRO-Offload",
            deepspeed={},
            bf16=True,
        ),
        Method(
            name="bf16-s4",
            tasks="ABC",
            group="dtype",
            baseline="bf16-synchronous",
            label="bf16 weights, S=4",
            config=_fixed(4),
            bf16=True,
        ),
    )
}
