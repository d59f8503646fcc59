"""Tables and plots of the observations; each is empty while there are none."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.observations.columns import LAGS, OVERLAP_LAGS, SMOOTHING
from benchmarks.convergence.observations.staleness import INTERVALS, PROBLEMS, WAYS
from benchmarks.convergence.report import svg
from benchmarks.convergence.report.results import Results
from benchmarks.convergence.report.tables import markdown
from benchmarks.convergence.settings import TASKS

_PLOTTED_LR = 3e-3


class Observations:
    """What ``observe`` has left in a folder."""

    def __init__(self, folder: Path) -> None:
        self._found = {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*.json"))
        }
        self.staleness: list[dict[str, Any]] = self._found.get("staleness", [])

    def tasks(self, kind: str) -> dict[str, Any]:
        """``"skew"``, ``"stability"`` or ``"fidelity"`` of each task that was looked at."""
        return {task: self._found[task][kind] for task in TASKS if task in self._found}

    def skew_table(self, task: str) -> str:
        """Shares of the top columns, by layer type, early and late."""
        kinds = self.tasks("skew").get(task, {})
        rows = []
        for kind in sorted(kinds, key=lambda kind: (kind != "all", kind)):
            steps = sorted(kinds[kind], key=int)
            rows.append([kind, *(_shares(kinds[kind][step]) for step in steps)])
        steps = sorted(next(iter(kinds.values())), key=int) if kinds else []
        return markdown(["layer type", *(f"step {step}" for step in steps)], rows)

    def stability_table(self) -> str:
        """Share of a choice that is chosen again, by the average that scores are taken over."""
        rows = [
            [
                f"{task}, {_smoothing(decay)}",
                *(_percent(lags.get(str(lag))) for lag in OVERLAP_LAGS),
            ]
            for task, stability in self.tasks("stability").items()
            for decay, lags in _by_smoothing(stability)
        ]
        return markdown(["task and score", *(f"{lag} steps later" for lag in OVERLAP_LAGS)], rows)

    def fidelity_table(self) -> str:
        """Share of a gradient's energy in columns chosen by itself, and by earlier ones."""
        rows = []
        for task, found in self.tasks("fidelity").items():
            for decay, lags in _by_smoothing(found["late"]):
                own = [_percent(found["elements"]), _percent(found["columns"])]
                rows.append(
                    [
                        f"{task}, {_smoothing(decay)}",
                        *(own if decay == 0 else ["", ""]),
                        *(_percent(lags.get(str(lag))) for lag in LAGS),
                    ]
                )
        header = ["task and score", "best 10% of elements", "best 10% of columns"]
        return markdown([*header, *(f"chosen {lag} steps before" for lag in LAGS)], rows)

    def slopes_table(self) -> str:
        """How the excess over AdamW grows with the update interval and with the learning rate."""
        rows = []
        for problem, (_, lrs) in PROBLEMS.items():
            for way in WAYS:
                excess = self._excess(problem, way)
                if not excess:
                    continue
                by_interval = {s: excess[_PLOTTED_LR, s] for s in INTERVALS if s > 1}
                by_lr = {lr: excess[lr, 4] for lr in lrs}
                base = next(r["adamw"] for r in self._rows(problem, way) if r["lr"] == _PLOTTED_LR)
                rows.append(
                    [
                        f"{problem}, {way}",
                        f"{100 * by_interval[4] / base:+.1f}%",
                        f"{100 * by_interval[8] / base:+.1f}%",
                        _slope(by_interval),
                        _slope(by_lr),
                    ]
                )
        header = ["problem and way", "S=4", "S=8", "excess grows as S to the", "as lr to the"]
        return markdown(header, rows)

    def plots(self) -> dict[str, str]:
        """Excess against the update interval, log-log, by file name."""
        plots = {}
        for problem in PROBLEMS:
            series = []
            for way in WAYS:
                excess = self._excess(problem, way)
                points = [(s, e) for (lr, s), e in excess.items() if lr == _PLOTTED_LR and e > 0]
                if points:
                    series.append(svg.Series(way, points))
            if series:
                plots[f"convergence/staleness_{problem}.svg"] = svg.lines(
                    f"{problem}: loss above AdamW's floor, lr {_PLOTTED_LR:g}",
                    series,
                    x_label="update interval S",
                    y_label="excess loss",
                    log_x=True,
                    log_y=True,
                )
        return plots

    def _rows(self, problem: str, way: str) -> list[dict[str, Any]]:
        return [r for r in self.staleness if (r["problem"], r["way"]) == (problem, way)]

    def _excess(self, problem: str, way: str) -> dict[tuple[float, int], float]:
        return {(r["lr"], r["interval"]): r["excess"] for r in self._rows(problem, way)}


def interval_plot(results: Results) -> str:
    """Zen-auto's interval over the steps of one run of each task."""
    series = []
    for task in TASKS.values():
        for run in results.of(task.name, "defaults", task.middle)[:1]:
            changes = run.get("intervals", [])
            ends = [*(step for step, _ in changes[1:]), task.steps]
            points = [
                (float(x), float(interval))
                for (step, interval), end in zip(changes, ends, strict=True)
                for x in (step, end)
            ]
            series.append(svg.Series(f"task {task.name}", points, dots=False))
    if not series:
        return ""
    return svg.lines(
        "Zen-auto's update interval", series, x_label="step", y_label="update interval S"
    )


def _by_smoothing(found: Mapping[str, Any]) -> list[tuple[float, Any]]:
    return [(decay, found[f"{decay:g}"]) for decay in SMOOTHING if f"{decay:g}" in found]


def _smoothing(decay: float) -> str:
    return "one gradient" if decay == 0 else f"average over about {round(1 / (1 - decay))} steps"


def _shares(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.0f}%"


def _slope(excess: Mapping[float, float]) -> str:
    """Least squares in the logarithms; none if something is not above AdamW."""
    if len(excess) < 2 or min(excess.values()) <= 0:
        return "-"
    xs, ys = [math.log(x) for x in excess], [math.log(y) for y in excess.values()]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return f"{above / sum((x - x_mean) ** 2 for x in xs):.1f}"
