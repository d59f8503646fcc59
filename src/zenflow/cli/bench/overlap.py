"""``zenflow bench overlap``: what each engine costs beyond compute, behind a stub accelerator."""

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from zenflow.cli.bench.contenders import (
    SYNCHRONOUS,
    Contender,
    chosen,
    deepspeed_zenflow,
    no_offload,
    no_update,
    ours,
    ours_synchronous,
    zero_offload,
)
from zenflow.cli.bench.interpreters import add_deepspeed_python, check_deepspeed_python
from zenflow.cli.bench.overlap_report import Cell, add_model
from zenflow.cli.bench.processes import Turns
from zenflow.cli.bench.report import Report, allowed_cores
from zenflow.cli.converters import integer, number, numbers
from zenflow.cli.errors import UsageError

NAME = "overlap"
SUMMARY = "what each engine costs beyond compute, behind a stub accelerator"
DESCRIPTION = """\
Train bf16 matrices whose backward pass takes a set time and no CPU, as if an accelerator computed
it, and hands over ready gradients. What a step takes beyond that time is what the engine costs.
Contenders have processes of their own and take turns: torch without offload, ours synchronous and
at several update intervals (the largest also without previews), and with --deepspeed-python
ZeRO-Offload and DeepSpeed's ZenFlow.
"""

_QUICK: dict[str, Any] = {
    "numel": [8_000_000],
    "fractions": None,
    "compute_ms": [20.0, 40.0, 80.0],  # set, so that a busy machine does not take longer
    "steps": 12,
    "rounds": 1,
}
_DEFAULT: dict[str, Any] = {
    "numel": [50_000_000, 200_000_000],
    "fractions": [0.25, 0.5, 1.0, 1.5, 2.0],
    "compute_ms": None,
    "steps": 16,
    "rounds": 2,
}
_CALIBRATION_STEPS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own flags to a parser."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small model, few steps, compute of 20, 40 and 80 ms: to see that it works, in "
        "under 3 minutes",
    )
    parser.add_argument(
        "--numel",
        type=numbers(integer(1)),
        metavar="N,N,...",
        help="parameters of each model. Default 50000000,200000000",
    )
    parser.add_argument(
        "--side",
        type=integer(8),
        default=1024,
        metavar="N",
        help="rows and columns of each matrix. Default 1024",
    )
    times = parser.add_mutually_exclusive_group()
    times.add_argument(
        "--fractions",
        type=numbers(number(0, 100)),
        metavar="F,F,...",
        help="compute times, as multiples of our synchronous mode's own time, which is measured "
        "first. Default 0.25,0.5,1,1.5,2",
    )
    times.add_argument(
        "--compute-ms", type=numbers(number(0, 1e6)), metavar="MS,MS,...", help="compute times"
    )
    parser.add_argument(
        "--steps",
        type=integer(1),
        metavar="N",
        help="timed steps of a contender at a compute time, in each round. Default 16",
    )
    parser.add_argument(
        "--rounds",
        type=integer(1),
        metavar="N",
        help="times that every contender has its turn. Default 2",
    )
    parser.add_argument(
        "--intervals",
        type=numbers(integer(1, auto=True)),
        default=[1, 2, 4, "auto"],
        metavar="S,S,...",
        help="our update intervals. Default 1,2,4,auto",
    )
    parser.add_argument(
        "--deepspeed-intervals",
        type=numbers(integer(1)),
        default=[1, 4],
        metavar="S,S,...",
        help="update intervals of DeepSpeed's ZenFlow. Default 1,4",
    )
    parser.add_argument(
        "--topk-ratio",
        type=number(0, 1, ends=False),
        default=0.05,
        metavar="SHARE",
        help="selected channels, ours and DeepSpeed's ZenFlow's. Default 0.05",
    )
    parser.add_argument(
        "--link-gbs",
        type=number(0, 1e6, ends=False),
        metavar="GB/S",
        help="put a link of this rate in each direction in front of our host memory; no other "
        "contender has one. Default: device and host share memory",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="WORD,...",
        help="contenders whose name contains a word, such as zenflow or S=4. Default: all",
    )
    add_deepspeed_python(parser, "measure its ZeRO-Offload and its ZenFlow beside ours")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured with each model."""

    contenders: list[Contender]
    fractions: list[float]
    compute_ms: list[float] | None
    steps: int
    rounds: int


def run(arguments: argparse.Namespace) -> Report:
    """Measure every model and report."""
    defaults = dict(_QUICK if arguments.quick else _DEFAULT)
    if arguments.fractions is not None:
        defaults["compute_ms"] = None
    values = {name: getattr(arguments, name) or default for name, default in defaults.items()}
    report = Report("overlap", "Overlap behind a stub accelerator")
    plan = Plan(
        contenders=_contenders(arguments),
        fractions=values["fractions"],
        compute_ms=values["compute_ms"],
        steps=values["steps"],
        rounds=values["rounds"],
    )
    if arguments.deepspeed_python is not None:
        report.versions["DeepSpeed"] = check_deepspeed_python(arguments.deepspeed_python)
    report.facts = _facts(arguments, plan)
    report.figures = {"models": []}
    for numel in values["numel"]:
        if numel < arguments.side**2:
            raise UsageError(
                f"--numel {numel} is less than one matrix of {arguments.side} x {arguments.side}; "
                "lower --side"
            )
        options: dict[str, Any] = {"deepspeed_python": arguments.deepspeed_python}
        if arguments.link_gbs is not None:
            options["link_bytes_per_s"] = arguments.link_gbs * 1e9
        workload = {"kind": "stub", "numel": numel, "side": arguments.side}
        cells, host_s = measure(plan, numel, workload, options)
        add_model(report, numel, host_s, cells)
    return report


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    ratio = arguments.topk_ratio
    found = [no_update(), no_offload(), ours_synchronous(ratio)]
    found += [ours(interval, ratio) for interval in arguments.intervals]
    numbers = [interval for interval in arguments.intervals if interval != "auto"]
    if numbers:
        found.append(ours(max(numbers), ratio, preview=False))
    if arguments.deepspeed_python is not None:
        found.append(zero_offload())
        found += [deepspeed_zenflow(n, ratio) for n in arguments.deepspeed_intervals]
    return chosen(found, arguments.only)


def measure(
    plan: Plan, numel: int, workload: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Cell], float | None]:
    """Every contender at every compute time, in turns.

    Returns:
        The timings, and our synchronous mode's own time for a step in seconds, if compute times
        are to follow from it.
    """
    host_s = None
    if plan.compute_ms is not None:
        times_s = [ms / 1e3 for ms in plan.compute_ms]
    else:
        host_s = _synchronous_s(numel, workload, options)
        times_s = [fraction * host_s for fraction in plan.fractions]
    turns = Turns(plan.contenders, numel, workload, **options)
    cells = {(c.name, time_s): Cell(c, time_s) for time_s in times_s for c in plan.contenders}
    groups = [[time_s] for time_s in times_s] if turns.all_alive else [times_s]
    try:
        for turn in range(plan.rounds):
            for group in groups:
                for contender in plan.contenders:
                    with turns.turn(contender) as child:
                        for time_s in group:
                            _say(numel, turn, contender, time_s)
                            answer = child.ask(
                                "block",
                                steps=plan.steps,
                                warm_up=contender.warm_up,
                                compute_s=time_s,
                            )
                            cells[contender.name, time_s].add(answer)
    finally:
        turns.close()
    return list(cells.values()), host_s


def _synchronous_s(numel: int, workload: dict[str, Any], options: dict[str, Any]) -> float:
    """Our synchronous mode's time for a step of no compute: what overlap has to hide."""
    contender = ours_synchronous(topk_ratio=0.05)
    turns = Turns([contender], numel, workload, **options)
    try:
        with turns.turn(contender) as child:
            answer = child.ask(
                "block", steps=_CALIBRATION_STEPS, warm_up=contender.warm_up, compute_s=0.0
            )
    finally:
        turns.close()
    return float(statistics.median(answer["seconds"]))


def _say(numel: int, turn: int, contender: Contender, time_s: float) -> None:
    print(
        f"{numel / 1e6:.0f} M parameters, round {turn + 1}, compute {time_s * 1e3:.0f} ms: "
        f"{contender.name}",
        file=sys.stderr,
        flush=True,
    )


def _facts(arguments: argparse.Namespace, plan: Plan) -> list[str]:
    link = (
        "device and host share memory"
        if arguments.link_gbs is None
        else f"in front of ours a link of {arguments.link_gbs:g} GB/s in each direction, whose copies "
        "take CPU time"
    )
    return [
        f"bf16 matrices of {arguments.side} x {arguments.side}; the backward pass sleeps and hands "
        f"over ready gradients, a layer's at a time; {link}",
        f"{plan.rounds} rounds of {plan.steps} timed steps of each contender at each compute time, "
        f"after {min(c.warm_up for c in plan.contenders)} or more untimed ones; "
        f"all {allowed_cores()} allowed cores for each contender",
        f"selected channels: {arguments.topk_ratio:g}; 5% of the columns hold about 40% of a "
        "gradient's energy, always the same ones",
        "beyond: mean step less compute, all that an engine costs; stall share: that over the mean "
        "step; host: time of our sweeps beside a step over their threads; waiting: for sweeps and "
        "the link; thread: the rest of our step() in the training thread, medians",
        f"bound: (compute + what ZeRO-Offload costs) / compute; {SYNCHRONOUS} and no offload are not "
        "stale",
    ]
