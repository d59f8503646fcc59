"""Copies and compute that are late, on purpose, and memory that is taken again at once."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import zenflow
from gpu_checks import given
from gpu_checks.report import Section
from zenflow.core.selection import num_selected

_RATIO = 0.1
LATE = ("nothing", "compute", "the step's own work", "to_host", "to_device", "both links")
_LATE_OF_ONE_CALL_S = 50e-6


class Case:
    """What is trained: shapes, steps, and how much is late in each of them."""

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]], num_steps: int, late_s: float):
        self.name = name
        self.shapes = tuple(shapes)
        self.num_steps = num_steps
        self.late_s = late_s


def check(section: Section, device: torch.device, quick: bool) -> None:
    """The device's weights equal those of a run without a link, after hundreds of steps."""
    if quick:
        wanted = [Case("small", [(64, 48), (48,), (96, 64)], 12, 0.0)]
    else:
        embeddings = [(8192, 2048)] * 3 + [(2048,)]
        wanted = [
            Case("large embeddings, no compute", embeddings, 100, 0.0),
            Case("many small weights", [(256, 192), (192,), (320, 128)] * 12, 150, 2e-3),
            Case("large embeddings, late copies", embeddings, 20, 20e-3),
        ]
    for case, interval in itertools.product(wanted, (1, 4)):
        if section.ran_out(f"{case.name}, S={interval}"):
            continue
        twin = _train(case, torch.device("cpu"), interval, streaming=False, late="nothing")
        lates = ("nothing",) if case.late_s == 0 else LATE
        for late, streaming in itertools.product(lates, (False, True)):
            what = f"{case.name}, S={interval}, {'streaming' if streaming else 'at step'}, late: {late}"
            if section.ran_out(what):
                break
            ours = _train(case, device, interval, streaming=streaming, late=late)
            wrong = [
                f"weight {i} by {given.difference(a, b):.2g}"
                for i, (a, b) in enumerate(zip(ours, twin, strict=True))
                if not given.same_bits(a, b)
            ]
            section.check(what, not wrong, ", ".join(wrong[:3]))
    for case in wanted:
        elements = sum(torch.Size(shape).numel() for shape in case.shapes)
        section.note(f"{case.name}: {elements:,} elements in bf16, {case.num_steps} steps a run")
    section.note(
        "each run ends with the bits of the same run on the CPU, where nothing is copied; between steps, "
        "device memory of many sizes is taken, filled with NaN and dropped"
    )


def _train(
    case: Case, device: torch.device, interval: int, *, streaming: bool, late: str
) -> list[Tensor]:
    dtype = torch.bfloat16
    nums = [num_selected(s[1], _RATIO) if len(s) == 2 else 0 for s in case.shapes]
    gradients = given.Gradients(case.shapes, nums, dtype, device)
    params = given.weights(case.shapes, dtype, device)
    optimizer = zenflow.ZenFlowAdamW(
        params,
        lr=1e-2,
        config={
            "topk_ratio": _RATIO,
            "update_interval": interval,
            "select_interval": 3,
            "stream_gradients": streaming,
        },
    )
    try:
        for step in range(case.num_steps):
            _be_late(optimizer, device, late, case.late_s, first=step == 1)
            given.backward(params, gradients.makers(step))
            optimizer.step()
            _spoil_free_memory(params, device)
        optimizer.synchronize()
        return [p.detach().cpu() for p in params]
    finally:
        optimizer.close()


def _be_late(
    optimizer: zenflow.ZenFlowAdamW, device: torch.device, late: str, seconds: float, *, first: bool
) -> None:
    """Keep streams busy, so that what is enqueued behind it runs late.

    Args:
        first: the first call in a run that finds an engine.
    """
    engine = optimizer._engine
    if device.type != "cuda" or late == "nothing" or engine is None:
        return
    parts: Any = engine.platform
    if late == "compute":
        _sleep(device, seconds, nullcontext())
    elif late == "the step's own work":
        if first:
            parts.device.run = _late_run(parts.device.run, device)
    else:
        for name in ("to_host", "to_device"):
            if late in (name, "both links"):
                _sleep(device, seconds, torch.cuda.stream(getattr(parts.link, f"_{name}")))


def _late_run(run: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """What the runtime enqueues falls further and further behind the host."""

    def late(function: Callable[..., None], *args: Any) -> None:
        _sleep(device, _LATE_OF_ONE_CALL_S, nullcontext())
        run(function, *args)

    return late


def _sleep(device: torch.device, seconds: float, where: AbstractContextManager[Any]) -> None:
    with torch.cuda.device(device), where:
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles, at about 1.5 GHz


def _spoil_free_memory(params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Memory given back too early is overwritten by its next owner."""
    if device.type == "cuda":
        for param in params[:4]:
            for share in (1, 2, 10):
                torch.full(
                    (param.numel() // share,), float("nan"), device=device, dtype=param.dtype
                )
