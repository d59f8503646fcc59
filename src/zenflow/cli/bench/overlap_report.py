"""The tables, targets and plot of the overlap benchmark."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zenflow.cli.bench.contenders import NO_OFFLOAD, SYNCHRONOUS, ZERO_OFFLOAD, Contender
from zenflow.cli.bench.report import Report, allowed_cores, table
from zenflow.cli.bench.summary import Spread
from zenflow.cli.plot import Line, plot

_HIDDEN = 0.85
"""Host time below this share of compute has to be hidden."""
_STALL_SHARE = 0.02
_TAIL = 1.15
_BOUND_SHARE = 0.95
_SYNCHRONOUS_SHARE = 1 / 3
"""Of what ZeRO-Offload costs, our synchronous mode at most."""


@dataclass
class Cell:
    """One contender at one compute time."""

    contender: Contender
    compute_s: float
    seconds: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Take one block's timings."""
        self.seconds += answer["seconds"]
        self.figures += answer["figures"]

    @property
    def spread(self) -> Spread:
        """Of the step times, in seconds."""
        return Spread.of(self.seconds)

    @property
    def beyond_s(self) -> float:
        """What the engine costs a step."""
        return self.spread.mean - self.compute_s

    @property
    def stall_share(self) -> float:
        """Of the step time."""
        return self.beyond_s / self.spread.mean

    @property
    def tail(self) -> float:
        """p99 over median."""
        return self.spread.p99 / self.spread.median

    def median_of(self, figure: str) -> float | None:
        """Of one of our own statistics; None for others."""
        return statistics.median(f[figure] for f in self.figures) if self.figures else None

    @property
    def host_s(self) -> float | None:
        """Our sweeps' time in a step, if their threads share it evenly. A mean: it varies."""
        if not self.figures:
            return None
        return statistics.fmean(f["host_busy_s"] for f in self.figures) / allowed_cores()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "contender": self.contender.name,
            "compute_s": self.compute_s,
            "step_s": self.spread.to_dict(),
            "beyond_s": self.beyond_s,
            "host_s": self.host_s,
            "ours": {name: self.median_of(name) for name in self.figures[0]}
            if self.figures
            else {},
            "seconds": self.seconds,
        }


def add_model(report: Report, numel: int, host_s: float | None, cells: list[Cell]) -> None:
    """Add one model's tables, targets and plot."""
    millions = f"{numel / 1e6:.0f} M"
    report.figures["models"].append(
        {"numel": numel, "synchronous_s": host_s, "cells": [cell.to_dict() for cell in cells]}
    )
    report.body += [f"## {millions} parameters", ""]
    if host_s is not None:
        alone = f"Our synchronous mode alone takes {host_s * 1e3:.1f} ms for a step of no compute."
        report.body += [alone, ""]
    times = list(dict.fromkeys(cell.compute_s for cell in cells))
    for time_s in times:
        at_time = [cell for cell in cells if cell.compute_s == time_s]
        report.body += _table(at_time, host_s)
    report.body += _targets(cells)
    report.body += _beside_others(cells)
    names = list(dict.fromkeys(cell.contender.name for cell in cells))
    lines = [
        Line(
            name,
            [(c.compute_s * 1e3, c.spread.mean * 1e3) for c in cells if c.contender.name == name],
        )
        for name in names
    ]
    report.pictures[f"{numel // 10**6}m"] = plot(
        lines,
        title=f"Mean step time behind a stub accelerator, {millions} parameters",
        x_label="compute time of a step, ms",
        y_label="step time, ms",
        diagonal="compute alone",
    )


def _table(cells: Sequence[Cell], host_s: float | None) -> list[str]:
    compute_s = cells[0].compute_s
    zero = next((cell for cell in cells if cell.contender.name == ZERO_OFFLOAD), None)
    columns = ["ms", "mean", "median", "p95", "p99/median", "beyond", "stall share"]
    columns += ["host", "waiting", "thread", "S"]
    columns += ["speed-up over ZeRO-Offload", "of the bound"] if zero else []
    rows = []
    for cell in cells:
        spread = cell.spread
        row = [cell.contender.name]
        row += [_ms(value) for value in (spread.mean, spread.median, spread.p95)]
        row += [f"{cell.tail:.2f}", _ms(cell.beyond_s), f"{cell.stall_share:.1%}"]
        row += [_ms(cell.host_s)]
        row += [_ms(cell.median_of(name)) for name in ("wait_s", "training_thread_s")]
        interval = cell.median_of("update_interval")
        row += ["" if interval is None else f"{interval:g}"]
        if zero:
            speed_up = zero.spread.mean / spread.mean
            row += [f"{speed_up:.2f}", f"{speed_up / _bound(zero):.0%}" if compute_s else ""]
        rows.append(row)
    times = f" ({compute_s / host_s:.2f} of the synchronous time)" if host_s else ""
    return [f"### Compute {compute_s * 1e3:.1f} ms{times}", "", *table(columns, rows)]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _bound(zero: Cell) -> float:
    return zero.spread.mean / zero.compute_s


def _targets(cells: Sequence[Cell]) -> list[str]:
    """Ours overlapped, where the host's time can be hidden: what was wanted and what was found."""
    rows = []
    for cell in cells:
        overlapped = cell.contender.is_ours and cell.contender.settings.get("overlap_step", True)
        if not overlapped or not cell.compute_s or cell.host_s is None:
            continue
        if cell.host_s >= _HIDDEN * cell.compute_s:
            continue
        zero = _beside(cells, cell, ZERO_OFFLOAD)
        bound = None
        if zero is not None:
            bound = zero.spread.mean / cell.spread.mean / _bound(zero)
        checks = [
            (cell.stall_share, cell.stall_share <= _STALL_SHARE, ".1%"),
            (cell.tail, cell.tail <= _TAIL, ".2f"),
            (bound, bound is None or bound >= _BOUND_SHARE, ".0%"),
        ]
        shown = [
            "" if value is None else f"{value:{form}} {'met' if met else 'missed'}"
            for value, met, form in checks
        ]
        rows.append([cell.contender.name, f"{cell.compute_s * 1e3:.1f}", *shown])
    if not rows:
        return []
    columns = ["", "compute, ms", f"stall share <= {_STALL_SHARE:.0%}", f"p99/median <= {_TAIL}"]
    columns += [f"speed-up >= {_BOUND_SHARE:.0%} of the bound"]
    heading = f"### Targets, where the host's time is below {_HIDDEN} of compute"
    return [heading, "", *table(columns, rows)]


def _beside_others(cells: Sequence[Cell]) -> list[str]:
    """What was wanted of ours beside others at the same compute time, and what was found."""
    names = {cell.contender.name for cell in cells}
    pairs = [("zenflow S=4", NO_OFFLOAD), ("zenflow S=4, no previews", NO_OFFLOAD)]
    pairs += [
        (f"zenflow S={interval}", f"DeepSpeed ZenFlow S={interval}, overlapped")
        for interval in (1, 2, 4)
    ]
    rows = []
    for compute_s in dict.fromkeys(cell.compute_s for cell in cells):
        found = {c.contender.name: c for c in cells if c.compute_s == compute_s}
        ms = f"{compute_s * 1e3:.1f}"
        for name, other in pairs:
            if {name, other} <= names:
                share = found[name].spread.mean / found[other].spread.mean
                rows.append([f"{name}: step / {other}", ms, *_judged(share, 1.0)])
        if {SYNCHRONOUS, ZERO_OFFLOAD} <= names:
            share = found[SYNCHRONOUS].beyond_s / found[ZERO_OFFLOAD].beyond_s
            name = f"{SYNCHRONOUS}: beyond / {ZERO_OFFLOAD}"
            rows.append([name, ms, *_judged(share, _SYNCHRONOUS_SHARE)])
    if not rows:
        return []
    return ["### Beside others", "", *table(["", "compute, ms", "share", "wanted", ""], rows)]


def _judged(share: float, wanted: float) -> list[str]:
    return [f"{share:.2f}", f"<= {wanted:.2f}", "met" if share <= wanted else "missed"]


def _beside(cells: Sequence[Cell], cell: Cell, name: str) -> Cell | None:
    for other in cells:
        if other.contender.name == name and other.compute_s == cell.compute_s:
            return other
    return None
