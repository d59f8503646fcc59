"""The host kernel against memory bandwidth and other CPU optimizers.

    python benchmarks/kernel.py [--output benchmarks/results/kernel_NAME_DATE.md]

All contenders take turns within each repeat, so that what else the machine does meets them alike;
medians are compared. DeepSpeed's CPU Adam takes part where it is installed.
"""

import argparse
import datetime
import importlib.util
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from zenflow.backends.host_kernel import HostState, NativeKernel, TorchKernel, choose_kernel
from zenflow.core.rules import SubStep
from zenflow.kernels import native

SEGMENT_NUMEL = 1 << 20
SLOTS = (1, 2, 4, 8)
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ADAMW = SubStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Attributes:
        run: one pass over all elements, with so many threads.
        bytes: that have to be moved for each element.
        steps: gradient steps that a pass applies; 0 for what is no optimizer.
    """

    name: str
    run: Callable[[int], None]
    bytes: int
    steps: int


class Model:
    """Flat state, slots and weights of a model of bf16 weights and gradients."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.state = HostState(
            torch.randn(numel), torch.randn(numel).mul_(1e-3), torch.rand(numel).mul_(1e-6)
        )
        self.slots = [torch.randn(numel).mul_(1e-2).bfloat16() for _ in range(max(SLOTS))]
        self.weights = torch.empty(numel, dtype=torch.bfloat16)
        self.grad32 = self.slots[0].float()
        self.step = torch.tensor(10.0)
        split = [t.split(SEGMENT_NUMEL) for t in (*self.state, self.weights, *self.slots)]
        self._segments = [
            (HostState(*tensors[:3]), tensors[3], tensors[4:])
            for tensors in zip(*split, strict=True)
        ]
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def sweep(self, kernel: Any, num_slots: int, num_threads: int) -> None:
        """Segment by segment, as the workers do."""
        coefficients = [ADAMW._replace(step=10 + i).coefficients() for i in range(num_slots)]

        delay = (num_slots + 1) / 2

        def share(first: int) -> None:
            for state, out, slots in self._segments[first::num_threads]:
                grads = slots[:num_slots]
                kernel.sweep(state, grads, coefficients, mean=False, delay=delay, out=out)

        pool = self._pools.setdefault(num_threads, ThreadPoolExecutor(num_threads))
        list(pool.map(share, range(num_threads)))

    def copy(self, _: int) -> None:
        self.state.exp_avg.copy_(self.state.master)

    def triad(self, _: int) -> None:
        torch.add(self.state.master, self.grad32, alpha=0.5, out=self.state.exp_avg)

    def fused(self, _: int) -> None:
        p, m, v = ([tensor] for tensor in self.state)
        torch._fused_adamw_(
            p,
            [self.grad32],
            m,
            v,
            [],
            [self.step],
            lr=ADAMW.lr,
            beta1=ADAMW.beta1,
            beta2=ADAMW.beta2,
            weight_decay=ADAMW.weight_decay,
            eps=ADAMW.eps,
            amsgrad=False,
            maximize=False,
        )

    def with_casts(self, update: Callable[[int], None]) -> Callable[[int], None]:
        def run(num_threads: int) -> None:
            self.grad32.copy_(self.slots[0])
            update(num_threads)
            self.weights.copy_(self.state.master)

        return run

    def deepspeed(self) -> Callable[[int], None]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        weight = torch.nn.Parameter(self.state.master)
        weight.grad = self.grad32
        optimizer = DeepSpeedCPUAdam([weight], lr=ADAMW.lr, weight_decay=ADAMW.weight_decay)
        return lambda _: optimizer.step()


def contenders(model: Model) -> list[Contender]:
    def sweep(kernel: Any, num_slots: int) -> Contender:
        name = f"sweep, {kernel.name}, S={num_slots}"
        bytes_moved = 24 + 2 + 2 * num_slots
        return Contender(name, lambda n: model.sweep(kernel, num_slots, n), bytes_moved, num_slots)

    chosen = choose_kernel()
    found = [
        Contender("copy fp32", model.copy, 8, 0),
        Contender("triad fp32", model.triad, 12, 0),
        Contender("torch AdamW fused, fp32", model.fused, 28, 1),
        Contender("torch AdamW fused, with casts", model.with_casts(model.fused), 40, 1),
    ]
    if HAS_DEEPSPEED:
        adam = model.deepspeed()
        found += [
            Contender("DeepSpeedCPUAdam, fp32", adam, 28, 1),
            Contender("DeepSpeedCPUAdam, with casts", model.with_casts(adam), 40, 1),
        ]
    found += [sweep(chosen, num_slots) for num_slots in SLOTS]
    if isinstance(chosen, NativeKernel):
        library = native.load()
        for name in (name for name in library.usable if name != chosen.name):
            found += [sweep(NativeKernel(library, name), num_slots) for num_slots in (1, 4)]
        found += [sweep(TorchKernel(), num_slots) for num_slots in (1, 4)]
    return found


def measure(
    found: list[Contender], threads: list[int], repeats: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of each pass, by contender and threads; one more repeat is thrown away."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            for contender in found:
                time.sleep(0.02)  # torch's idle threads spin for a while after their work
                begin = time.perf_counter()
                contender.run(num_threads)
                elapsed = time.perf_counter() - begin
                if repeat:
                    seconds.setdefault((contender.name, num_threads), []).append(elapsed)
    return seconds


def table(
    found: list[Contender], seconds: dict[tuple[str, int], list[float]], threads: int, numel: int
) -> list[str]:
    def per_step(contender: Contender) -> float:
        return statistics.median(seconds[contender.name, threads]) / max(1, contender.steps) / numel

    by_name = {contender.name: per_step(contender) for contender in found}
    fused, casts = (by_name[f"torch AdamW fused, {kind}"] for kind in ("fp32", "with casts"))
    lines = [
        f"### {threads} thread{'s' if threads > 1 else ''}",
        "",
        "| | ns per parameter and gradient step | range | bytes | GB/s | / fused | / fused with casts |",
        "|---|---|---|---|---|---|---|",
    ]
    for contender in found:
        scale = 1e9 / max(1, contender.steps) / numel
        times = [second * scale for second in seconds[contender.name, threads]]
        median = statistics.median(times)
        speed = contender.bytes / max(1, contender.steps) / median
        ratios = (
            f"{median * 1e-9 / fused:.2f} | {median * 1e-9 / casts:.2f}" if contender.steps else "|"
        )
        lines.append(
            f"| {contender.name} | {median:.3f} | {min(times):.3f}-{max(times):.3f} "
            f"| {contender.bytes} | {speed:.1f} | {ratios} |"
        )
    return [*lines, ""]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> list[str]:
    """Of the system, without the name of this machine or its build, and of what ran."""
    return [
        f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
    ]


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    powers = [2**i for i in range(int(math.log2(cores or 1)) + 1)]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters (default 2**26)")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({*powers, cores or 1}))
    parser.add_argument("--output", type=Path, help="a file for the report, beside standard output")
    options = parser.parse_args()
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    found = contenders(Model(options.numel))
    seconds = measure(found, options.threads, options.repeats)
    software = versions()
    if HAS_DEEPSPEED:
        software.append(f"DeepSpeed {version('deepspeed')}")
    report = [
        "# Host kernel",
        "",
        f"- Command: `python {' '.join(sys.argv)}`",
        f"- Date: {datetime.date.today()}",
        f"- Hardware: {cpu_name()}, {cores} cores allowed",
        f"- Versions: {', '.join(software)}",
        f"- Load average before and after: {load:.2f}, {os.getloadavg()[0]:.2f}",
        f"- {options.numel:,} parameters, gradients and weights in bf16, state in fp32; sweeps in "
        f"segments of {SEGMENT_NUMEL:,}; medians of {options.repeats} interleaved repeats",
        "- bytes: to be moved for each parameter and pass; GB/s is that over the time",
        "",
    ]
    for num_threads in options.threads:
        report += table(found, seconds, num_threads, options.numel)
    text = "\n".join(report)
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
