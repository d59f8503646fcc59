"""Against AdamW, and against the sequential oracle."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zenflow
from gpu_checks import given
from gpu_checks.report import Section
from zenflow.core.selection import channel_energy
from zenflow.testing import oracle as oracles

SHAPES = ((96, 80), (80,), (33, 17), (6, 12, 3, 3), (400, 200), (5, 9, 4))
_ADAMW_TOLERANCE = 2e-6


def check_adamw(section: Section, device: torch.device, quick: bool) -> None:
    """Synchronous with S=1, and with every channel selected, we are AdamW."""
    num_steps = 12 if quick else 100
    synchronous = {"overlap_step": False, "update_interval": 1, "select_interval": 7}
    configs: list[dict[str, Any]] = [synchronous | {"topk_ratio": k} for k in (0, 0.1, 1)]
    configs.append({"topk_ratio": 1, "update_interval": 4})
    for config, dtype in itertools.product(configs, (torch.float32, torch.bfloat16)):
        ours = given.weights(SHAPES, dtype, device)
        reference = [nn.Parameter(p.detach().float().clone()) for p in ours]
        optimizer = zenflow.ZenFlowAdamW(ours, lr=1e-2, weight_decay=0.1, config=config)
        adamw = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1)
        random = torch.Generator().manual_seed(1)
        for _ in range(num_steps):
            for param, its in zip(ours, reference, strict=True):
                param.grad = torch.randn(param.shape, generator=random).to(device, dtype)
                its.grad = param.grad.float()
            optimizer.step()
            adamw.step()
        optimizer.close()
        _compare_with_adamw(section, f"AdamW, {dtype}, {config}", ours, reference)
    section.note(
        f"equal to torch.optim.AdamW over {num_steps} steps: fp32 within {_ADAMW_TOLERANCE:g}; bf16 within "
        "one rounding of AdamW's on an fp32 copy"
    )


def _compare_with_adamw(
    section: Section, what: str, ours: Sequence[Tensor], reference: Sequence[Tensor]
) -> None:
    excess = 0.0
    for param, its in zip(ours, reference, strict=True):
        bound = torch.full_like(its, _ADAMW_TOLERANCE)
        if param.dtype != torch.float32:
            bound += its.abs() * 2.0**-7
        excess = max(excess, ((param.float() - its).abs() - bound).max().item())
    section.check(what, excess <= 0, f"beyond the bound by {excess:.2g}")


@dataclass(frozen=True)
class Case:
    """One run beside the oracle.

    Attributes:
        events: one letter each. ``s``: a step. ``p``: one in which every second parameter has no gradient.
            ``x``: one whose last gradient is not finite. ``y``: synchronize. ``r``: save, and load into
            new weights and a new optimizer. ``e``: the user writes a weight.
    """

    name: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    events: str = "ssspssxssrsssyssessrsss"
    shapes: tuple[tuple[int, ...], ...] = field(default=SHAPES)


def cases(quick: bool) -> list[Case]:
    """The product of what can differ, fp32 and bf16 in turns."""
    axes = itertools.product((1, 2, 4), ("replay", "accumulate"), (False, True), (None, 1.0))
    found = [
        Case(
            f"S={s}, {rule}, {'streaming' if stream else 'at step'}"
            + (", clipped" if bound else ""),
            {
                "update_interval": s,
                "update_rule": rule,
                "stream_gradients": stream,
                "max_grad_norm": bound,
                "select_interval": 2 + number % 3,
                "topk_ratio": (0.1, 0.3)[number % 2],
                "host_threads": 1 + number % 3,
            },
            (torch.float32, torch.bfloat16)[number // 2 % 2],
        )
        for number, (s, rule, stream, bound) in enumerate(axes)
    ]
    found.append(
        Case("S=3, no lookahead, k=0", {"update_interval": 3, "lookahead": False, "topk_ratio": 0})
    )
    found.append(Case("S=2, synchronous", {"update_interval": 2, "overlap_step": False}))
    found.append(Case("S=2, warm-up", {"update_interval": 2, "full_warm_up_rounds": 5}))
    return found[:: 5 if quick else 1]


def check_oracle(section: Section, device: torch.device, quick: bool) -> None:
    """Every bit of every weight after every event."""
    wanted = cases(quick)
    num_steps = 0
    for number, case in enumerate(wanted):
        if section.ran_out(f"{len(wanted) - number} runs beside the oracle"):
            break
        num_steps += _run_beside_oracle(section, case, device, seed=number)
    section.note(f"equal to the oracle, bit for bit after each of {num_steps} events")


class _Oracle(oracles.Oracle):
    """Takes norms where the runtime takes them: a sum's last bit depends on who adds."""

    device: torch.device

    def _clip(self, grads: Sequence[Tensor]) -> float:
        bound = self.config.max_grad_norm
        if bound is None:
            return 1.0
        there = [grad.to(self.device) for grad in grads]
        if self.config.stream_gradients:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in reversed(there)]
        else:
            norms = list(torch._foreach_norm(there, 2, dtype=torch.float32))
        total = float(torch.linalg.vector_norm(torch.stack(norms).cpu().double()))
        return min(1.0, bound / (total + 1e-6))


def _run_beside_oracle(section: Section, case: Case, device: torch.device, seed: int) -> int:
    """Returns the events until the first difference."""
    random = torch.Generator().manual_seed(seed)
    params = given.weights(case.shapes, case.dtype, device)
    optimizer = zenflow.ZenFlowAdamW(_groups(params), config=case.config)
    oracle = _Oracle(
        [p.detach().cpu() for p in params], _groups(range(len(params))), optimizer.config
    )
    oracle.device = device

    def energy(grad: Tensor) -> Tensor:
        return channel_energy(grad.to(device)).cpu()

    with mock.patch.object(oracles, "channel_energy", energy):
        for number, event in enumerate(case.events):
            if event == "y":
                optimizer.synchronize()
                oracle.synchronize()
            elif event == "r":
                params, optimizer = _reloaded(params, optimizer)
            elif event == "e":
                value = torch.randn(params[0].shape, generator=random).to(case.dtype)
                with torch.no_grad():
                    params[0].copy_(value)
                oracle.edit(0, value)
            else:
                grads = _draw(case, event, random)
                given.backward(params, [g if g is None else _on(g, device) for g in grads])
                optimizer.step()
                oracle.step(grads)
            worst = [
                (given.difference(p, w), i)
                for i, (p, w) in enumerate(zip(params, oracle.weights(), strict=True))
                if not given.same_bits(p, w)
            ]
            if worst:
                detail = f"event {number} of {case.events}: weight {max(worst)[1]} by {max(worst)[0]:.2g}"
                section.check(f"oracle, {case.name}", False, detail)
                optimizer.close()
                return number
    section.check(f"oracle, {case.name}", optimizer.stats.step == oracle.t)
    optimizer.close()
    return len(case.events)


def _groups(params: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[2:], "lr": 3e-2, "betas": (0.8, 0.95)},
    ]


def _on(grad: Tensor, device: torch.device) -> Any:
    return lambda: grad.to(device, copy=True)


def _draw(case: Case, event: str, random: torch.Generator) -> list[Tensor | None]:
    grads: list[Tensor | None] = []
    for index, shape in enumerate(case.shapes):
        grad = torch.randn(shape, generator=random)
        if len(shape) > 1:
            sizes = torch.rand(shape[1], generator=random) ** 3
            grad *= sizes.reshape(1, -1, *[1] * (len(shape) - 2))
        grads.append(None if event == "p" and index % 2 else grad.to(case.dtype))
    if event == "x":
        grads[0].view(-1)[-1] = float("inf")  # type: ignore[union-attr]
    return grads


def _reloaded(
    params: list[nn.Parameter], optimizer: zenflow.ZenFlowAdamW
) -> tuple[list[nn.Parameter], zenflow.ZenFlowAdamW]:
    saved = optimizer.state_dict()
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer.close()
    new = zenflow.ZenFlowAdamW(_groups(copies), config=optimizer.config)
    new.load_state_dict(saved)
    return copies, new
