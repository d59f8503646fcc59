"""Who takes part: an engine with its settings, as plain values that a child process can be sent."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zenflow.cli.errors import UsageError

NO_UPDATE = "no update: the benchmark itself"
NO_OFFLOAD = "torch AdamW fused, no offload"
SYNCHRONOUS = "zenflow synchronous"
ZERO_OFFLOAD = "DeepSpeed ZeRO-Offload"
_AUTO_WARM_UP = 24
"""Steps until Zen-auto has come from 1 to its largest interval and stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of a table.

    Attributes:
        name: what tables call it.
        engine: "none", "torch", "zenflow" or "deepspeed".
        threads: for computing and updating; None: all allowed cores.
        settings: for ZenFlowConfig, or DeepSpeed's ``zero_optimization.zenflow``.
        warm_up: steps before timing begins, at each change of the workload.
        bytes_per_parameter: memory with the model and a stub's gradients, roughly; what decides how
            many contenders can be alive at once.
    """

    name: str
    engine: str
    threads: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 6
    bytes_per_parameter: int

    @property
    def is_ours(self) -> bool:
        """Whether it is this library."""
        return self.engine == "zenflow"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def no_update() -> Contender:
    """Gradients are dropped: what the benchmark costs, and so the least that can be told apart."""
    return Contender(name=NO_UPDATE, engine="none", bytes_per_parameter=4)


def no_offload() -> Contender:
    """Everything on the device, state in the weights' dtype."""
    return Contender(name=NO_OFFLOAD, engine="torch", bytes_per_parameter=9)


def ours(
    interval: int | str, topk_ratio: float, threads: int | None = None, *, preview: bool = True
) -> Contender:
    """This library, overlapped."""
    settings = {"update_interval": interval, "topk_ratio": topk_ratio, "host_threads": threads}
    return Contender(
        name=f"zenflow S={interval}{'' if preview else ', no previews'}",
        engine="zenflow",
        threads=threads,
        settings={**settings, "preview": preview},
        warm_up=_AUTO_WARM_UP if interval == "auto" else 8,
        bytes_per_parameter=30,
    )


def ours_synchronous(topk_ratio: float, threads: int | None = None) -> Contender:
    """This library, each step waiting for the host: exact AdamW."""
    settings = {"update_interval": 1, "topk_ratio": topk_ratio, "host_threads": threads}
    return Contender(
        name=SYNCHRONOUS,
        engine="zenflow",
        threads=threads,
        settings={**settings, "overlap_step": False},
        bytes_per_parameter=24,
    )


def zero_offload() -> Contender:
    """DeepSpeed's synchronous offload, stage 2."""
    return Contender(name=ZERO_OFFLOAD, engine="deepspeed", bytes_per_parameter=28)


def deepspeed_zenflow(interval: int, topk_ratio: float, *, overlap: bool = True) -> Contender:
    """DeepSpeed's ZenFlow, stage 2."""
    settings = {
        "topk_ratio": topk_ratio,
        "select_strategy": "step",
        "select_interval": 16 * interval,
        "update_interval": interval,
        "overlap_step": overlap,
        "full_warm_up_rounds": 0,
    }
    return Contender(
        name=f"DeepSpeed ZenFlow S={interval}{', overlapped' if overlap else ''}",
        engine="deepspeed",
        settings=settings,
        warm_up=8,
        bytes_per_parameter=50,
    )


def chosen(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    """Those whose names contain one of the words.

    Raises:
        UsageError: if a word fits none.
    """
    if only is None:
        return list(contenders)
    names = [contender.name for contender in contenders]
    for word in only:
        if not any(word.lower() in name.lower() for name in names):
            raise UsageError(f"--only {word!r} fits no contender; they are: {', '.join(names)}")
    return [c for c in contenders if any(word.lower() in c.name.lower() for word in only)]
