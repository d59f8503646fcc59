"""``zenflow bench train``: tokens a second of a real model on the CPU."""

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field, replace

from zenflow.cli.bench.contenders import (
    Contender,
    chosen,
    deepspeed_zenflow,
    no_offload,
    ours,
    ours_synchronous,
    zero_offload,
)
from zenflow.cli.bench.interpreters import add_deepspeed_python, check_deepspeed_python
from zenflow.cli.bench.processes import Turns
from zenflow.cli.bench.report import Report, allowed_cores, table
from zenflow.cli.bench.summary import Spread
from zenflow.cli.converters import integer, number, numbers
from zenflow.cli.errors import UsageError

NAME = "train"
SUMMARY = "tokens a second of a real model on the CPU"
DESCRIPTION = """\
Train a Llama with random bf16 weights on the CPU with few tokens a step, where an update weighs
most. The CPU computes and updates: ours sweeps in what compute leaves of all cores, the others are
measured with several numbers of threads, so that each shows its best. Needs transformers
('.[finetune]').
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own flags to a parser."""
    parser.add_argument(
        "--hidden", type=integer(64), default=768, metavar="N", help="model width. Default 768"
    )
    parser.add_argument(
        "--layers",
        type=integer(1),
        default=16,
        metavar="N",
        help="decoder layers. Default 16: with the default width 111 million parameters",
    )
    parser.add_argument(
        "--tokens",
        type=numbers(integer(2)),
        default=[32, 128],
        metavar="N,N,...",
        help="tokens a step. Default 32,128",
    )
    parser.add_argument(
        "--intervals",
        type=numbers(integer(1, auto=True)),
        default=[1, 4, "auto"],
        metavar="S,S,...",
        help="our update intervals. Default 1,4,auto",
    )
    parser.add_argument(
        "--threads",
        type=numbers(integer(1)),
        metavar="N,N,...",
        help="thread counts of the contenders that are not ours. Default: half of the allowed "
        "cores, and all",
    )
    parser.add_argument(
        "--steps", type=integer(1), default=10, metavar="N", help="timed steps a turn. Default 10"
    )
    parser.add_argument(
        "--rounds", type=integer(1), default=2, metavar="N", help="turns of each. Default 2"
    )
    parser.add_argument(
        "--topk-ratio",
        type=number(0, 1, ends=False),
        default=0.05,
        metavar="SHARE",
        help="selected channels, ours and DeepSpeed's ZenFlow's. Default 0.05",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="WORD,...",
        help="contenders whose name contains a word. Default: all",
    )
    add_deepspeed_python(
        parser, "measure its ZeRO-Offload and its ZenFlow beside ours; it needs transformers too"
    )


@dataclass
class _Row:
    contender: Contender
    seconds: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> Report:
    """Measure every contender at every number of tokens and report."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("zenflow bench train needs transformers: pip install '.[finetune]'")
    report = Report("train", "Training on the CPU")
    if arguments.deepspeed_python is not None:
        report.versions["DeepSpeed"] = check_deepspeed_python(
            arguments.deepspeed_python, "transformers"
        )
    contenders = _contenders(arguments)
    report.facts = [
        f"Llama of width {arguments.hidden}, {arguments.layers} layers, bf16, random weights; "
        f"{arguments.rounds} turns of {arguments.steps} timed steps each",
        "steps in ms; threads: of torch, and as many of ours that sweep beside it",
        f"selected channels: {arguments.topk_ratio:g}; torch without offload keeps its state in bf16",
    ]
    report.figures = {"tokens": {}}
    for tokens in arguments.tokens:
        rows, numel = _measure(arguments, contenders, tokens)
        report.body += [f"## {tokens} tokens a step, {numel / 1e6:.1f} M parameters", ""]
        report.body += _table(rows, tokens)
        report.figures["tokens"][tokens] = {
            "numel": numel,
            "contenders": [
                {
                    "contender": row.contender.name,
                    "tokens_per_s": tokens / Spread.of(row.seconds).mean,
                    "step_s": Spread.of(row.seconds).to_dict(),
                    "seconds": row.seconds,
                }
                for row in rows
            ],
        }
    return report


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    cores = allowed_cores()
    counts = sorted(set(arguments.threads or [max(1, cores // 2), cores]))
    if counts[-1] > cores:
        raise UsageError(f"--threads {counts[-1]}: {cores} cores are allowed here")
    ratio = arguments.topk_ratio
    alone = [no_offload(), *([zero_offload()] if arguments.deepspeed_python else [])]
    found = [_with_threads(c, n, f"{n}") for c in alone for n in counts]
    found.append(_with_threads(ours_synchronous(ratio), cores, f"{cores}"))
    for interval in arguments.intervals:
        found.append(_with_threads(ours(interval, ratio), cores, f"{cores}"))
    if arguments.deepspeed_python:
        # It divides the cores by itself, and computes on what it left itself.
        for n in counts:
            found.append(_with_threads(deepspeed_zenflow(4, ratio), n, f"{n}"))
    return chosen(found, arguments.only)


def _with_threads(contender: Contender, threads: int, label: str) -> Contender:
    return replace(contender, threads=threads, name=f"{contender.name} | {label}")


def _measure(
    arguments: argparse.Namespace, contenders: list[Contender], tokens: int
) -> tuple[list[_Row], int]:
    workload = {
        "kind": "llama",
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "tokens": tokens,
    }
    numel = 14 * arguments.hidden**2 * arguments.layers  # for the memory that they need
    turns = Turns(contenders, numel, workload, deepspeed_python=arguments.deepspeed_python)
    rows = [_Row(contender) for contender in contenders]
    try:
        for turn in range(arguments.rounds):
            for row in rows:
                print(
                    f"{tokens} tokens, round {turn + 1}: {row.contender.name}",
                    file=sys.stderr,
                    flush=True,
                )
                with turns.turn(row.contender) as child:
                    warm_up = row.contender.warm_up
                    answer = child.ask("block", steps=arguments.steps, warm_up=warm_up)
                row.seconds += answer["seconds"]
                row.intervals += [step["update_interval"] for step in answer["figures"]]
    finally:
        turns.close()
    return rows, next(iter(turns.about.values()))["numel"]


def _table(rows: list[_Row], tokens: int) -> list[str]:
    best = {row.contender.name: tokens / Spread.of(row.seconds).mean for row in rows}
    baseline = max((v for k, v in best.items() if "no offload" in k), default=None)
    cells = []
    for row in rows:
        spread = Spread.of(row.seconds)
        name = row.contender.name
        name, threads = name.split(" | ")
        cell = [name, threads, f"{best[row.contender.name]:.1f}"]
        cell += [f"{value * 1e3:.0f}" for value in (spread.mean, spread.median, spread.p95)]
        cell += [f"{spread.p99 / spread.median:.2f}"]
        cell += ["" if baseline is None else f"{best[row.contender.name] / baseline:.2f}"]
        cells.append(cell)
    columns = ["", "threads", "tokens/s", "mean", "median", "p95", "p99/median"]
    return table([*columns, "of no offload at its best"], cells)
