"""Short timings: what memory, the link and a sweep reach here."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zenflow.backends.host_kernel import HostKernel
from zenflow.cli.bench.passes import FlatModel, Pass

NUMEL = 1 << 24
"""Parameters in each timed pass: 26 bytes of memory each, more than most caches hold."""
_SLOTS = (1, 4)
_REPEATS = 3
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One rate.

    Attributes:
        name: what was done.
        threads: with how many.
        gb_per_s: bytes that had to move, over the time.
        ns_per_parameter: and gradient step, of a sweep.
    """

    name: str
    threads: int
    gb_per_s: float
    ns_per_parameter: float | None = None


def measure_host(kernel: HostKernel, threads: list[int], numel: int = NUMEL) -> list[Speed]:
    """Copy and sweep host memory with each number of threads."""
    if kernel.name == "torch":
        numel //= 4  # several times slower
    model = FlatModel(numel, max(_SLOTS))
    passes = [model.copy(), *(model.sweep(kernel, num_slots) for num_slots in _SLOTS)]
    before = torch.get_num_threads()
    try:
        speeds = []
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            speeds += [_speed(one, num_threads, numel) for one in passes]
        return speeds
    finally:
        torch.set_num_threads(before)
        model.close()


def _speed(one: Pass, num_threads: int, numel: int) -> Speed:
    seconds = _best_s(lambda: one.run(num_threads))
    return Speed(
        name=one.name,
        threads=num_threads,
        gb_per_s=one.bytes * numel / seconds / _GIGA,
        ns_per_parameter=seconds * 1e9 / numel / one.steps if one.steps else None,
    )


def measure_link(device: torch.device, num_bytes: int = 1 << 28) -> tuple[list[Speed], str | None]:
    """Copy between an accelerator and host memory, pageable and pinned.

    Returns:
        The rates, and why memory cannot be pinned, or None if it can.
    """
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    hosts = {"pageable": torch.empty(num_bytes, dtype=torch.uint8)}
    refused = None
    try:
        hosts["pinned"] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        refused = str(error)
    speeds = []
    for kind, here in hosts.items():
        for name, source, target in (("to host", there, here), ("to device", here, there)):

            def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                target.copy_(source, non_blocking=True)
                torch.accelerator.synchronize(device)

            rate = num_bytes / _best_s(copy) / _GIGA
            speeds.append(Speed(name=f"{name}, {kind} memory", threads=1, gb_per_s=rate))
    return speeds, refused


def _best_s(run: Callable[[], None]) -> float:
    """Seconds of the fastest of a few runs, the first one not counted."""
    run()
    times = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return min(times)
