"""``zenflow bench kernel``: the host kernel against memory bandwidth and other CPU optimizers."""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from zenflow.backends.host_kernel import HostKernel, NativeKernel, TorchKernel, choose_kernel
from zenflow.cli.bench.interpreters import (
    add_deepspeed_python,
    check_deepspeed_python,
    command_in,
    deepspeed_environment,
    read_answer,
    reply_channel,
)
from zenflow.cli.bench.passes import SEGMENT_NUMEL, FlatModel, Pass
from zenflow.cli.bench.report import Report, allowed_cores, table, thread_counts, versions
from zenflow.cli.converters import integer, numbers
from zenflow.cli.errors import RunError, UsageError
from zenflow.kernels import native

NAME = "kernel"
SUMMARY = "the host kernel beside memory bandwidth, torch's and DeepSpeed's CPU optimizers"
DESCRIPTION = """\
Time one pass over a flat model: our sweep with 1, 2, 4 and 8 slots, a copy, a triad, torch's fused
AdamW with and without the casts that bf16 needs, and DeepSpeedCPUAdam where there is DeepSpeed.
All take turns within each repeat, so that what else the machine does meets them alike.
"""

_SLOTS = (1, 2, 4, 8)
_TURN_PAUSE_S = 0.02
"""torch's idle threads spin for a while after their work."""


class Timing(NamedTuple):
    """The seconds that one kind of pass took with some number of threads, repeat by repeat."""

    name: str
    bytes: int
    steps: int
    threads: int
    seconds: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own flags to a parser."""
    parser.add_argument(
        "--numel",
        type=integer(1),
        default=1 << 26,
        metavar="N",
        help="parameters; 38 bytes of memory each. Default 67108864: far more than a cache",
    )
    parser.add_argument(
        "--repeats", type=integer(1), default=11, metavar="N", help="timed passes. Default 11"
    )
    parser.add_argument(
        "--threads",
        type=numbers(integer(1)),
        metavar="N,N,...",
        help="thread counts to measure. Default: 1, 2, 4, ... and all allowed cores",
    )
    add_deepspeed_python(parser, "measure in that interpreter, with DeepSpeedCPUAdam beside ours")


def run(arguments: argparse.Namespace) -> Report:
    """Measure, here or in DeepSpeed's interpreter, and report."""
    cores = allowed_cores()
    threads = arguments.threads or thread_counts(cores)
    if max(threads) > cores:
        raise UsageError(f"--threads {max(threads)}: {cores} cores are allowed here")
    report = Report("kernel", "Host kernel")
    if arguments.deepspeed_python is None:
        found = measure(arguments.numel, arguments.repeats, threads)
        report.versions = _versions()
    else:
        check_deepspeed_python(arguments.deepspeed_python)
        found, report.versions = _measure_in(
            arguments.deepspeed_python, [arguments.numel, arguments.repeats, *threads]
        )
    report.facts = [
        f"{arguments.numel:,} parameters, gradients and weights in bf16, state in fp32; sweeps in "
        f"segments of {SEGMENT_NUMEL:,}; medians of {arguments.repeats} interleaved repeats",
        "bytes: to be moved for each parameter and pass; GB/s is that over the time",
    ]
    for num_threads in threads:
        report.body += _table([t for t in found if t.threads == num_threads], arguments.numel)
    report.figures = {"numel": arguments.numel, "timings": [t._asdict() for t in found]}
    return report


def measure(numel: int, repeats: int, threads: Sequence[int]) -> list[Timing]:
    """Time every pass with every number of threads; one more repeat is thrown away."""
    torch.manual_seed(0)
    model = FlatModel(numel, max(_SLOTS))
    passes = _passes(model)
    seconds: dict[tuple[int, int], list[float]] = {}
    threads_before = torch.get_num_threads()
    for repeat in range(repeats + 1):
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            for i, one in enumerate(passes):
                time.sleep(_TURN_PAUSE_S)
                begin_s = time.perf_counter()
                one.run(num_threads)
                elapsed_s = time.perf_counter() - begin_s
                if repeat:
                    seconds.setdefault((i, num_threads), []).append(elapsed_s)
    torch.set_num_threads(threads_before)
    model.close()
    return [
        Timing(passes[i].name, passes[i].bytes, passes[i].steps, num_threads, times)
        for (i, num_threads), times in seconds.items()
    ]


def _passes(model: FlatModel) -> list[Pass]:
    chosen = choose_kernel()
    passes = [model.copy(), model.triad(), *model.fused()]
    if _has_deepspeed():
        passes += model.deepspeed()
    passes += [model.sweep(chosen, num_slots) for num_slots in _SLOTS]
    if isinstance(chosen, NativeKernel):
        library = native.load()
        others = [NativeKernel(library, name) for name in library.usable if name != chosen.name]
        slower: list[HostKernel] = [*others, TorchKernel()]
        for kernel in slower:
            passes += [model.sweep(kernel, num_slots) for num_slots in (1, 4)]
    return passes


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _versions() -> dict[str, str]:
    return versions() | ({"DeepSpeed": version("deepspeed")} if _has_deepspeed() else {})


def _measure_in(python: str, plan: Sequence[int]) -> tuple[list[Timing], dict[str, str]]:
    """The same in another interpreter, which has DeepSpeed."""
    process = subprocess.Popen(
        command_in(python, __name__, *map(str, plan)),
        stdout=subprocess.PIPE,
        env=deepspeed_environment(python),
        text=True,
    )
    assert process.stdout is not None
    answer: Any = read_answer(process.stdout)
    if process.wait() or answer is None:
        raise RunError(f"the benchmark failed in {python}; its messages are above")
    return [Timing(*timing) for timing in answer["timings"]], answer["versions"]


def main() -> None:
    """What the other interpreter runs."""
    reply = reply_channel()
    numel, repeats, *threads = map(int, sys.argv[1:])
    reply({"timings": measure(numel, repeats, threads), "versions": _versions()})


def _table(timings: Sequence[Timing], numel: int) -> list[str]:
    def per_step_ns(timing: Timing) -> list[float]:
        return [seconds * 1e9 / max(1, timing.steps) / numel for seconds in timing.seconds]

    medians = {timing.name: statistics.median(per_step_ns(timing)) for timing in timings}
    baselines = [medians[f"torch AdamW fused, {kind}"] for kind in ("fp32", "with casts")]
    rows = []
    for timing in timings:
        times, median = per_step_ns(timing), medians[timing.name]
        ratios = [f"{median / base:.2f}" if timing.steps else "" for base in baselines]
        speed = timing.bytes / max(1, timing.steps) / median
        spread = f"{min(times):.3f}-{max(times):.3f}"
        rows.append((timing.name, f"{median:.3f}", spread, timing.bytes, f"{speed:.1f}", *ratios))
    threads = timings[0].threads
    columns = ["", "ns per parameter and gradient step", "range", "bytes", "GB/s"]
    columns += ["/ fused", "/ fused with casts"]
    return [f"### {threads} thread{'s' if threads > 1 else ''}", "", *table(columns, rows)]
