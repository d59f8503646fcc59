"""Device memory against its formula, and that a steady state allocates nothing."""

import itertools
from typing import Any

import torch

import zenflow
from gpu_checks import given
from gpu_checks.overlap import give_back_memory
from gpu_checks.report import Section
from zenflow.core.budget import DeviceNeed, Split, device_need
from zenflow.core.selection import num_selected
from zenflow.runtime.pipeline import _MAX_STREAMING_BYTES

_RATIO = 0.1
_TOLERANCE = 1.02
_ROUNDING_BYTES = 32 << 20
"""The allocator's rounding, small results of a step, and the formula's terms that are not there."""


def _shapes(quick: bool) -> list[tuple[int, ...]]:
    if quick:
        return [(256, 192), (192,)] * 3
    return [(16384, 2048), *[(2048, 2048), (5632, 2048), (2048, 5632), (2048,)] * 8]


def _config(interval: int, streaming: bool) -> dict[str, Any]:
    return {
        "topk_ratio": _RATIO,
        "update_interval": interval,
        "select_interval": 4,
        "stream_gradients": streaming,
    }


class Run:
    """Steps without activations: what is allocated is the optimizer's, weights and gradients."""

    def __init__(self, device: torch.device, interval: int, streaming: bool, quick: bool) -> None:
        self.shapes = _shapes(quick)
        self.device = device
        nums = [num_selected(s[1], _RATIO) if len(s) == 2 else 0 for s in self.shapes]
        self.gradients = given.Gradients(self.shapes, nums, torch.bfloat16, device)
        self.base_bytes = _allocated(device)
        self.params = given.weights(self.shapes, torch.bfloat16, device)
        self.optimizer = zenflow.ZenFlowAdamW(self.params, config=_config(interval, streaming))
        self.step = 0

    def go(self, num_steps: int) -> None:
        for _ in range(num_steps):
            given.backward(self.params, self.gradients.makers(self.step))
            self.optimizer.step()
            self.step += 1

    def need(self, interval: int, streaming: bool) -> DeviceNeed:
        split = [
            Split(s[0], s[1], 1, num_selected(s[1], _RATIO)) for s in self.shapes if len(s) == 2
        ]
        residents = [s[0] for s in self.shapes if len(s) == 1]
        streaming_bytes = _MAX_STREAMING_BYTES if streaming else None
        return device_need(split, residents, 2, interval, streaming_bytes=streaming_bytes)


def check_peak(section: Section, device: torch.device, quick: bool) -> None:
    """The allocator's peak is at most the formula's, in both capture modes."""
    rows = []
    for interval, streaming in itertools.product((1, 4), (False, True)):
        mode = f"S={interval}, {'streaming' if streaming else 'at step'}"
        if section.ran_out(mode):
            continue
        run = Run(device, interval, streaming, quick)
        run.go(6 if quick else 12)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        run.go(4 if quick else 12)
        numel = sum(p.numel() for p in run.params)
        need = run.need(interval, streaming)
        cells = [f"{need.peak / numel:.2f}"]
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - run.base_bytes
            cells += [f"{peak / numel:.2f}", f"{peak / need.peak:.2f}"]
            bound = need.peak * _TOLERANCE + _ROUNDING_BYTES
            section.check(f"peak, {mode}", peak <= bound, f"{peak:,} > {bound:,.0f} bytes")
        else:
            cells += ["not measured here", ""]
        rows.append([mode, *cells, *(f"{value / numel:.2f}" for value in need)])
        run.optimizer.close()
        del run
        give_back_memory(device)
    section.note(
        f"bf16, k={_RATIO:.0%}, bytes a parameter; gradients are given, so there are no activations"
    )
    section.table(("", "formula", "peak", "/", *DeviceNeed._fields), rows)


def check_steady(section: Section, device: torch.device, quick: bool) -> None:
    """After warm-up no memory is taken from the device or pinned, and the pool does not grow."""
    for interval, streaming in itertools.product((1, 4), (False, True)):
        mode = f"S={interval}, {'streaming' if streaming else 'at step'}"
        if section.ran_out(mode):
            continue
        run = Run(device, interval, streaming, quick)
        run.go(8 if quick else 24)
        before = _counters(run)
        run.go(8 if quick else 40)
        after = _counters(run)
        for name, value in before.items():
            grown = after[name] - value
            section.check(f"{name} constant, {mode}", grown <= 0, f"grown by {grown:,}")
        run.optimizer.close()
        del run
        give_back_memory(device)
    section.note("watched: " + ", ".join(before))


def _counters(run: Run) -> dict[str, int]:
    engine = run.optimizer._engine
    assert engine is not None
    found = {"slot pool bytes": engine.pipeline.pool.allocated_bytes}
    if run.device.type != "cuda":
        return found
    torch.cuda.synchronize(run.device)
    stats = torch.cuda.memory_stats(run.device)
    found["device segments taken"] = stats["segment.all.allocated"]
    found["device bytes reserved"] = stats["reserved_bytes.all.current"]
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    for name in ("num_host_alloc", "allocated_bytes.current"):
        if name in host:
            found[f"pinned {name}"] = host[name]
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
