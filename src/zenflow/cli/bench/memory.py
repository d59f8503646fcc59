"""``zenflow bench memory``: host memory that each engine takes, as resident growth."""

import argparse
from typing import Any

from zenflow.cli.bench.contenders import (
    Contender,
    chosen,
    deepspeed_zenflow,
    ours,
    ours_synchronous,
    zero_offload,
)
from zenflow.cli.bench.interpreters import add_deepspeed_python, check_deepspeed_python
from zenflow.cli.bench.processes import Child
from zenflow.cli.bench.report import Report, table
from zenflow.cli.converters import integer, number
from zenflow.cli.errors import UsageError

NAME = "memory"
SUMMARY = "host memory that each engine takes, as resident growth"
DESCRIPTION = """\
Train bf16 matrices for some steps and see how much resident memory the process and its children
gain beyond weights and gradients, which would be on the device. Each engine has a process of its
own, and is measured with a small and a large model, so that what does not depend on the model
(code, thread stacks, a child's own torch) is told apart.
"""

_SMALL_SHARE = 8
"""The small model is this many times smaller."""
_LINK_BYTES_PER_S = 1e12
"""A link that costs no time: the layout across a link is what is wanted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own flags to a parser."""
    parser.add_argument(
        "--numel",
        type=integer(1),
        default=200_000_000,
        metavar="N",
        help="parameters of the large model; DeepSpeed's ZenFlow needs about 50 bytes each. "
        "Default 200000000",
    )
    parser.add_argument(
        "--side",
        type=integer(8),
        default=1024,
        metavar="N",
        help="rows and columns of each matrix. Default 1024",
    )
    parser.add_argument(
        "--interval",
        type=integer(1),
        default=4,
        metavar="S",
        help="update interval, ours and DeepSpeed's ZenFlow's. Default 4",
    )
    parser.add_argument(
        "--topk-ratio",
        type=number(0, 1, ends=False),
        default=0.05,
        metavar="SHARE",
        help="selected channels, ours and DeepSpeed's ZenFlow's. Default 0.05",
    )
    parser.add_argument(
        "--steps",
        type=integer(1),
        default=20,
        metavar="N",
        help="steps; memory is read after each and the most counts. Default 20",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="WORD,...",
        help="contenders whose name contains a word. Default: all",
    )
    add_deepspeed_python(parser, "measure its ZeRO-Offload and its ZenFlow beside ours")


def run(arguments: argparse.Namespace) -> Report:
    """Measure every contender at both sizes and report."""
    small = arguments.numel // _SMALL_SHARE
    if small < arguments.side**2:
        raise UsageError(
            f"--numel {arguments.numel}: an eighth of it is less than one matrix of "
            f"{arguments.side} x {arguments.side}; lower --side"
        )
    report = Report("memory", "Host memory")
    if arguments.deepspeed_python is not None:
        report.versions["DeepSpeed"] = check_deepspeed_python(arguments.deepspeed_python)
    measured = [
        (
            contender.name + (", across a link" if link else ""),
            [_measure(contender, link, numel, arguments) for numel in (small, arguments.numel)],
        )
        for contender, link in _contenders(arguments)
    ]
    (small_numel, _), (numel, _) = measured[0][1]
    rows, figures = [], []
    for name, ((_, small_bytes), (_, num_bytes)) in measured:
        slope = (num_bytes - small_bytes) / (numel - small_numel)
        figures.append(
            {
                "contender": name,
                "numel": [small_numel, numel],
                "grown_bytes": [small_bytes, num_bytes],
                "bytes_per_parameter": slope,
            }
        )
        grown = [f"{growth / 2**30:.2f}" for growth in (small_bytes, num_bytes)]
        rows.append([name, *grown, f"{num_bytes / numel:.1f}", f"{slope:.1f}"])
    report.figures = {"contenders": figures}
    report.facts = [
        f"{numel:,} bf16 parameters in matrices of {arguments.side} x {arguments.side}, and "
        f"{small_numel:,}; the most after any of {arguments.steps} steps; update interval "
        f"{arguments.interval}, selected channels {arguments.topk_ratio:g}",
        "grown: proportional set size of the process and its children (smaps_rollup), less what it "
        "was with weights and one set of gradients, before the engine was made",
        "in shared memory, slots are the gradients themselves, and what is selected is host memory "
        "too; across a link both sides' buffers are counted, as both lie in host memory here",
    ]
    columns = ["", f"grown, {small_numel / 1e6:.0f} M, GiB", f"grown, {numel / 1e6:.0f} M, GiB"]
    columns += ["bytes per parameter", "of it in proportion to the model"]
    report.body = table(columns, rows)
    return report


def _contenders(arguments: argparse.Namespace) -> list[tuple[Contender, bool]]:
    ratio, interval = arguments.topk_ratio, arguments.interval
    overlapped = ours(interval, ratio)
    found = [ours_synchronous(ratio), overlapped]
    if arguments.deepspeed_python is not None:
        found += [zero_offload(), deepspeed_zenflow(interval, ratio)]
    pairs = []
    for contender in chosen(found, arguments.only):
        pairs.append((contender, False))
        if contender == overlapped:
            pairs.append((contender, True))
    return pairs


def _measure(
    contender: Contender, link: bool, numel: int, arguments: argparse.Namespace
) -> tuple[int, int]:
    """Parameters, and bytes grown."""
    options: dict[str, Any] = {"deepspeed_python": arguments.deepspeed_python}
    if link:
        options["link_bytes_per_s"] = _LINK_BYTES_PER_S
    workload = {"kind": "stub", "numel": numel, "side": arguments.side}
    child = Child(contender, workload, **options)
    try:
        grown = child.ask("memory", steps=arguments.steps)["growth"]
        return child.about["numel"], grown
    finally:
        child.close()
