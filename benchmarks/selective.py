"""The training thread's time in a step with the CPU as the device, part by part.

    python benchmarks/selective.py [--output benchmarks/results/selective_NAME_DATE.md]

Three optimizers over models of the same shape take turns, so that what else the machine does meets all
alike: the native kernel with a worker's help, without, and plain torch. Medians of wall time are
compared. Sweeps are waited for outside of the steps.
"""

import argparse
import dataclasses
import datetime
import gc
import os
import platform as machine
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.backends.device import CpuDevice
from zenflow.backends.device_kernel import DeviceKernel
from zenflow.backends.host_kernel import KERNEL_VARIABLE
from zenflow.cli.bench.report import allowed_cores, cpu_name
from zenflow.kernels.selective import DeviceSide, Look
from zenflow.optimizer import ZenFlowAdamW
from zenflow.runtime.platform import Platform

MB = 1e6
CACHE_LINE = 64
WARM_UP_STEPS = 8
PARTS = {
    "finite": "finite check and gather",
    "written": "fingerprints",
    "publish": "publish",
    "preview": "previews, fingerprints taken",
    "gather": "gather after a new selection",
    "update": "update and scatter",
    "score": "scores (mean: they are rare)",
    "rest": "everything else (Python)",
    "step": "step",
}
DEVICE_PARTS = ("finite", "written", "publish", "preview", "gather", "update", "score")


class TimedDevice(CpuDevice):
    """Adds up the seconds of each kind of device work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def run(self, function: Callable[..., None], *args: Any) -> None:
        begin = time.perf_counter()
        function(*args)
        self.seconds[function.__name__.strip("_")] += time.perf_counter() - begin


class TwoLooks:
    """The kernel at hand, with a look taken in two, to time each."""

    def __init__(self, kernel: DeviceKernel, device: TimedDevice) -> None:
        self._kernel, self._device = kernel, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def observe(self, look: Look, out: Tensor) -> None:
        half = torch.empty_like(out)
        self._device.run(self.finite, look._replace(watched=[], rounded=[]), out)
        self._device.run(self.written, look._replace(shares=[], grads=[]), half[-2:])
        out[-2:] = half[-2:]

    def finite(self, look: Look, out: Tensor) -> None:
        self._kernel.observe(look, out)

    def written(self, look: Look, out: Tensor) -> None:
        self._kernel.observe(look, out)


class TimedAdamW(ZenFlowAdamW):
    """The optimizer with a device that is timed."""

    def _make_platform(self, device: torch.device) -> Platform:
        platform = super()._make_platform(device)
        self.device = TimedDevice()
        kernel = TwoLooks(platform.device_kernel, self.device)
        return dataclasses.replace(platform, device=self.device, device_kernel=kernel)


class Contender:
    """An optimizer and its model of equal square matrices."""

    def __init__(self, kernel: str, options: argparse.Namespace, *, helped: bool = False) -> None:
        os.environ[KERNEL_VARIABLE] = kernel
        size = options.size
        self.params = [
            nn.Parameter(torch.randn(size, size).mul_(0.02).bfloat16())
            for _ in range(options.matrices)
        ]
        skew = torch.randn(size).exp_()  # some columns matter, and it is always the same ones
        self.grads = [torch.randn(size, size).mul_(skew).bfloat16() for _ in range(3)]
        config = {
            "topk_ratio": options.topk_ratio,
            "update_interval": options.interval,
            "select_interval": options.select_interval,
            "host_threads": 1,
        }
        self.optimizer = TimedAdamW(self.params, lr=1e-4, config=config)
        self.steps = 0
        self.seconds: dict[str, list[float]] = defaultdict(list)
        try:
            self.step()  # chooses the kernel
            device_kernel = self.optimizer._running_engine().platform.device_kernel
            if not helped and kernel != "torch":
                device_kernel._kernel._invite = None
        finally:
            del os.environ[KERNEL_VARIABLE]

    @property
    def sides(self) -> list[DeviceSide]:
        segments = self.optimizer._running_engine().pipeline.segments
        return [segment.side for segment in segments if segment.side is not None]

    def step(self) -> None:
        self.steps += 1
        for i, param in enumerate(self.params):
            param.grad = self.grads[(i + self.steps) % len(self.grads)].clone()
        engine = self.optimizer._running_engine()
        for segment in engine.pipeline.segments:
            if segment.sweep is not None:
                segment.sweep.await_weights()
        device = engine.platform.device
        assert isinstance(device, TimedDevice)
        device.seconds.clear()
        begin = time.perf_counter()
        self.optimizer.step()
        elapsed = time.perf_counter() - begin
        if self.steps > WARM_UP_STEPS:
            parts = {name: device.seconds.get(name, 0.0) for name in DEVICE_PARTS}
            known = sum(parts.values())
            parts |= {"step": elapsed, "rest": elapsed - known}
            for name, seconds in parts.items():
                self.seconds[name].append(seconds)

    def median_ms(self, part: str) -> float:
        average = statistics.fmean if part == "score" else statistics.median
        return average(self.seconds[part]) * 1e3


def bytes_moved(sides: list[DeviceSide], interval: int) -> dict[str, float]:
    """What each part has to read and write, in whole cache lines of the weights."""
    numel = sum(side.weight.numel() for side in sides)
    states = [side.state.master.numel() for side in sides if side.state is not None]
    lines = sum(_lines(side) for side in sides) * CACHE_LINE
    gathered = 2 * sum(states)
    return {
        "finite": 2 * numel + 2 * gathered,  # a written line is read first
        "written": 2 * numel,
        "publish": 3 * 2 * numel / interval,
        "preview": 3 * 2 * numel,
        "update": 24 * sum(states) + gathered + 2 * lines,
    }


def _lines(side: DeviceSide) -> int:
    """Cache lines of the weight that hold a selected channel."""
    if side.channels is None:
        return 0
    per_line = CACHE_LINE // side.weight.element_size()
    return len(side.weight) * len((side.channels // per_line).unique())


def copy_gb_per_s(numel: int, repeats: int) -> float:
    """Of a copy of bf16, reads and writes counted."""
    source = torch.ones(numel, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return 4e-9 * numel / statistics.median(times)


def table(contenders: dict[str, Contender], interval: int) -> list[str]:
    moved = bytes_moved(next(iter(contenders.values())).sides, interval)
    moved["step"] = sum(moved.values())
    columns = ["part", *(f"{name}, ms" for name in contenders), "MB"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for part, words in PARTS.items():
        times = [contender.median_ms(part) for contender in contenders.values()]
        if part not in moved and max(times) < 0.01:
            continue
        traffic = f"{moved[part] / MB:.0f}" if part in moved else ""
        lines.append(f"| {words} | {' | '.join(f'{t:.2f}' for t in times)} | {traffic} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--matrices", type=int, default=60)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each")
    parser.add_argument("--topk-ratio", type=float, default=0.05)
    parser.add_argument("--interval", type=int, default=4, help="update interval S")
    parser.add_argument(
        "--select-interval", type=int, default=64, help="steps (default 64: where auto settles)"
    )
    parser.add_argument("--repeats", type=int, default=25, help="steps of each contender")
    parser.add_argument("--kernel", help="instruction set (default: the best)")
    parser.add_argument("--output", type=Path, help="a file for the report, beside standard output")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    contenders = {
        "native and a helper": Contender(options.kernel or "", options, helped=True),
        "native": Contender(options.kernel or "", options),
        "torch": Contender("torch", options),
    }
    native = contenders["native"]
    kernel = native.optimizer._running_engine().platform.kernel.name
    gc.disable()
    for _ in range(WARM_UP_STEPS + options.repeats):
        for contender in contenders.values():
            contender.step()
    gc.enable()
    numel = options.matrices * options.size**2
    report = [
        "# Selective path on the CPU as the device",
        "",
        f"- Command: `python {' '.join(sys.argv)}`",
        f"- Date: {datetime.date.today()}",
        f"- Hardware: {cpu_name()}, {allowed_cores()} cores allowed",
        f"- Versions: {machine.system()} {machine.machine()}, Python {machine.python_version()}, "
        f"torch {torch.__version__}",
        f"- Load average before and after: {load:.2f}, {os.getloadavg()[0]:.2f}",
        f"- {options.matrices} matrices of {options.size} x {options.size} in bf16 ({numel:,} "
        f"parameters), topk_ratio {options.topk_ratio}, S={options.interval}, "
        f"select_interval {options.select_interval}; native: {kernel}; "
        f"medians of {options.repeats} interleaved steps, sweeps finished before each",
        f"- Copy of as many bf16 elements by one thread: {copy_gb_per_s(numel, 9):.1f} GB/s, reads and "
        "writes counted",
        "- MB: what a part has to move, in whole cache lines where it writes columns; a line that is "
        "written is read first",
        "",
        *table(contenders, options.interval),
        "",
    ]
    text = "\n".join(report)
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    for contender in contenders.values():
        contender.optimizer.close()


if __name__ == "__main__":
    main()
