"""Step time of a real model with and without offload."""

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

import zenflow
from gpu_checks import llama
from gpu_checks.report import Section
from zenflow.runtime.memory import available_memory

_DEVICE_BYTES = 16 + 8  # of a parameter: AdamW in bf16, and a generous share of activations
_HOST_BYTES = 24
_MAX_STEP_RATIO = 1.15


@dataclass(frozen=True)
class Contender:
    """An optimizer; no config: torch's fused AdamW."""

    name: str
    config: dict[str, Any] | None


CONTENDERS = (
    Contender("no offload: torch AdamW, fused", None),
    Contender("S=4", {"update_interval": 4}),
    Contender("synchronous, S=1", {"overlap_step": False, "update_interval": 1}),
    Contender("S=auto", {"update_interval": "auto"}),
    Contender("S=4, streaming", {"update_interval": 4, "stream_gradients": True}),
    Contender("S=1", {"update_interval": 1}),
    Contender("S=2", {"update_interval": 2}),
    Contender("S=auto, streaming", {"update_interval": "auto", "stream_gradients": True}),
)


@dataclass
class Measured:
    """Of one contender, over its counted steps."""

    periods_s: list[float]
    stall_s: float
    overhead_s: float
    host_busy_s: float
    interval: int
    peak_bytes: int

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.periods_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.periods_s)

    @property
    def slowest_s(self) -> float:
        return max(self.periods_s)


def choose_size(device: torch.device, quick: bool) -> llama.Size:
    """About 1 B parameters, or as many layers of it as fit on the device and the host."""
    if quick:
        return llama.Size(64, 128, 2, 2, 256, batch=2, length=16)
    size = llama.Size(2048, 5632, 16, 16, 32000, batch=4, length=2048)
    device_bytes = torch.cuda.mem_get_info(device)[0]
    available = available_memory()
    host_bytes = device_bytes if available is None else available.num_bytes
    while size.layers > 2 and (
        size.num_parameters * _DEVICE_BYTES > 0.9 * device_bytes
        or size.num_parameters * _HOST_BYTES > 0.8 * host_bytes
    ):
        size = llama.Size(**{**vars(size), "layers": size.layers - 2})
    return size


def check(section: Section, device: torch.device, quick: bool) -> None:
    """One row for each contender; the stall and the evenness of steps at S=4 are checked."""
    size = choose_size(device, quick)
    num_steps = 6 if quick else 30
    section.note(
        f"{size.num_parameters:,} parameters in bf16, {size.layers} layers of {size.hidden}, "
        f"{size.num_tokens} tokens a step, {num_steps} counted steps each"
    )
    found: dict[str, Measured] = {}
    for contender in CONTENDERS[:: 3 if quick else 1]:
        if section.ran_out(contender.name):
            continue
        found[contender.name] = _measure(contender, size, device, num_steps)
        give_back_memory(device)
    base = next(iter(found.values()), None)
    if base is None:
        return
    section.table(
        (
            "",
            "ms a step",
            "median",
            "slowest/median",
            "/ no offload",
            "tokens/s",
            "stall %",
            "own ms",
            "host busy ms",
            "S",
            "peak GiB",
        ),
        [_row(name, m, base, size) for name, m in found.items()],
    )
    if not quick:
        _judge(section, found)


def _row(name: str, m: Measured, base: Measured, size: llama.Size) -> list[str]:
    return [
        name,
        f"{m.mean_s * 1e3:.1f}",
        f"{m.median_s * 1e3:.1f}",
        f"{m.slowest_s / m.median_s:.2f}",
        f"{m.mean_s / base.mean_s:.2f}",
        f"{size.num_tokens / m.mean_s:,.0f}",
        f"{m.stall_s / m.mean_s:.1%}",
        f"{m.overhead_s * 1e3:.1f}",
        f"{m.host_busy_s * 1e3:.1f}",
        str(m.interval or ""),
        f"{m.peak_bytes / 2**30:.2f}",
    ]


def _judge(section: Section, found: dict[str, Measured]) -> None:
    """What the project promises where the host has time enough beside compute."""
    ours, synchronous = found.get("S=4"), found.get("synchronous, S=1")
    if ours is None or synchronous is None:
        return
    section.check("S=4 is faster than synchronous", ours.mean_s < synchronous.mean_s)
    stall = ours.stall_s / ours.mean_s
    if stall <= 0.02:
        section.check("no step is slow at S=4", ours.slowest_s <= _MAX_STEP_RATIO * ours.median_s)
    else:
        section.note(f"the host is too slow to hide S=4 here: stall {stall:.1%}")


def _measure(
    contender: Contender, size: llama.Size, device: torch.device, num_steps: int
) -> Measured:
    model = llama.make(size, device)
    if contender.config is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-4, config=contender.config)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (8, size.batch, size.length), generator=random).to(
        device
    )
    measured = Measured([], 0.0, 0.0, 0.0, 0, 0)
    begin_s = 0.0
    warm_up = 2 if num_steps < 10 else 8
    for step in range(warm_up + num_steps):
        if step == warm_up:
            _wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            begin_s = time.perf_counter()
        model(tokens[step % len(tokens)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warm_up:
            _wait(device)
            end_s = time.perf_counter()
            measured.periods_s.append(end_s - begin_s)
            begin_s = end_s
            if contender.config is not None:
                _add(measured, optimizer.stats, num_steps)
    if device.type == "cuda":
        measured.peak_bytes = torch.cuda.max_memory_allocated(device)
    if contender.config is not None:
        optimizer.close()
    return measured


def _add(measured: Measured, stats: zenflow.StepStats, num_steps: int) -> None:
    measured.stall_s += stats.stall_s / num_steps
    measured.overhead_s += stats.step_overhead_s / num_steps
    measured.host_busy_s += stats.host_busy_s / num_steps
    measured.interval = stats.update_interval


def give_back_memory(device: torch.device) -> None:
    """Also what torch's allocators keep, so that the next run starts as the first one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
