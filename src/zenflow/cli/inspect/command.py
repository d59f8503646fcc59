"""The subcommand: read a selection log, print tables, draw plots."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zenflow.cli.errors import UsageError
from zenflow.cli.finetune.outputs import SELECTION_LOG
from zenflow.cli.inspect.findings import Finding, findings
from zenflow.cli.plot import Line, plot
from zenflow.core.selection_log import SelectionLog, parse

NAME = "inspect"
SUMMARY = "show whether a run's gradients suit ZenFlow, from its selection log"
DESCRIPTION = """\
Show how skewed a run's gradients were, how stable its selected channels, and the update interval
over time. Record a run with `zenflow finetune --selection-log`, or with
ZenFlowConfig(selection_log="selection.jsonl"). Works while the run goes on.
"""
_MAX_LINES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zenflow inspect`` to a parser."""
    parser.add_argument(
        "log", metavar="LOG|DIR", help=f"a selection log, or a directory with a {SELECTION_LOG}"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="where the plots go: LOG's name with -skew.svg, -stability.svg, -interval.svg. "
        "Default: beside the log",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON; no plots")


def run(arguments: argparse.Namespace) -> int:
    """Inspect a log and return the exit code.

    Raises:
        UsageError: if the log cannot be read or the plots not written.
    """
    path = Path(arguments.log).expanduser()
    if os.path.isdir(path):
        path /= SELECTION_LOG
    log, found = _read(path)
    if arguments.json:
        content = {
            "topk_ratio": log.topk_ratio,
            "update_intervals": log.update_intervals,
            "findings": [asdict(finding) for finding in found],
        }
        print(json.dumps(content, indent=1))
        return 0
    print("\n".join(_text(log, found)))
    folder = path.parent if arguments.output is None else Path(arguments.output).expanduser()
    for written in _draw(log, found, folder, path.stem):
        print(f"wrote {written}")
    return 0


def _read(path: Path) -> tuple[SelectionLog, list[Finding]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            log = parse(lines)
        return log, findings(log)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; record one with `zenflow finetune "
            "--selection-log` or ZenFlowConfig(selection_log=...)"
        ) from error
    except ValueError as error:
        raise UsageError(f"cannot use {path}: {error}") from error


def _text(log: SelectionLog, found: Sequence[Finding]) -> list[str]:
    steps = f"steps {log.scorings[0].step} to {log.scorings[-1].step}"
    head = f"{found[0].weights} weights, {len(log.scorings)} scorings, {steps}"
    if log.num_unreadable:
        head += f"; {log.num_unreadable} lines could not be read"
    lags = sorted({lag for finding in found for lag in finding.kept})
    skew = [
        ["layer type", "weights", "top 1%", "top 5%", "top 10%", "selected", "they hold"],
        *([f.kind, str(f.weights), *_percents([*f.shares, f.selected, f.captured])] for f in found),
    ]
    stability = [
        ["layer type", *(f"{lag}" for lag in lags), "held", "steps between"],
        *(
            [f.kind, *_percents([*(f.kept.get(lag) for lag in lags), f.captured_before]), _lag(f)]
            for f in found
        ),
    ]
    return [
        f"zenflow inspect: {head}",
        "",
        "Share of the squared gradient norm in the top channels, and in the selected ones:",
        *_table(skew),
        "",
        "Share of a choice that is chosen again so many steps later; what the last choice still holds",
        'when the next one is made ("held"), and the mean steps between:',
        *_table(stability),
        "",
        *_verdict(found[0]),
    ]


def _verdict(whole: Finding) -> list[str]:
    gain = whole.captured / whole.selected
    lines = [
        f"{whole.selected:.0%} of the channels hold {whole.captured:.0%} of the squared gradient "
        f"norm, {gain:.1f} times an even share."
    ]
    if whole.captured_before is not None and whole.lag is not None:
        lines.append(
            f"The choice before, {whole.lag:.1f} steps old on average, still holds "
            f"{whole.captured_before:.0%}: "
            + (
                "it lasts."
                if whole.captured_before > 0.8 * whole.captured
                else "it ages"
                + (
                    "; a smaller select_interval would follow faster."
                    if whole.lag > 1
                    else " within a step, and no select_interval follows faster."
                )
            )
        )
    return lines


def _draw(log: SelectionLog, found: Sequence[Finding], folder: Path, stem: str) -> list[Path]:
    shown = sorted(found[1:], key=lambda f: -f.weights)[: _MAX_LINES - 1]
    kinds = [found[0], *(shown if len(found) > 2 else [])]
    stairs = _stairs(log.update_intervals, log.scorings[-1].step)
    pictures = {
        "skew": (
            [Line(f.kind, [(step, 100 * share) for step, share in f.skew]) for f in kinds],
            ("Squared gradient norm in the top 10% of channels", "step", "%"),
        ),
        "stability": (
            [Line(f.kind, [(lag, 100 * s) for lag, s in f.kept.items()]) for f in kinds if f.kept],
            ("Share of a choice that is chosen again", "steps later", "%"),
        ),
        "interval": (
            [Line("S", stairs)] if stairs else [],
            ("Update interval", "step", "steps"),
        ),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (lines, (title, x_label, y_label)) in pictures.items():
            if lines:
                picture = plot(lines, title=title, x_label=x_label, y_label=y_label)
                written.append(folder / f"{stem}-{name}.svg")
                written[-1].write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror}") from error
    return written


def _stairs(intervals: Sequence[tuple[int, int]], last: int) -> list[tuple[float, float]]:
    if not intervals:
        return []
    ends = [*(step for step, _ in intervals[1:]), max([last, *(step for step, _ in intervals)])]
    return [
        (float(x), float(interval))
        for (step, interval), end in zip(intervals, ends, strict=True)
        for x in (step, end)
    ]


def _percents(shares: Sequence[float | None]) -> list[str]:
    return ["" if share is None else f"{share:.0%}" for share in shares]


def _lag(finding: Finding) -> str:
    return "" if finding.lag is None else f"{finding.lag:.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
