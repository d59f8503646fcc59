"""Markdown tables."""

import math
from collections.abc import Sequence

from benchmarks.convergence.methods import METHODS, Method
from benchmarks.convergence.report.results import Results, Spread
from benchmarks.convergence.settings import TASKS

GROUPS = {
    "interval": "The update interval",
    "lookahead": "Lookahead",
    "rule": "Rule and windows",
    "selection": "Selection",
    "early": "Early training",
    "preview": "Previews",
    "dtype": "Clipping and dtype",
}
_NONE = "-"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; empty if there are no rows."""
    if not rows:
        return "(no results yet)"
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main_table(results: Results, task: str) -> str:
    """Each main method at its own best learning rate, beside AdamW at its own."""
    rows = []
    paper = results.tuned_gap(task, "paper")
    for method in _in("main"):
        lr = results.best_lr(task, method.name)
        if lr is None:
            continue
        loss = Spread.of(results.values(task, method.name, lr))
        gap = results.tuned_gap(task, method.name)
        row = [method.label, f"{lr:g}", plus_minus(loss, sign=False), _gap(gap, method)]
        base_lr = results.best_lr(task, method.baseline)
        base = Spread.of(results.values(task, method.baseline, base_lr)) if base_lr else None
        row += [_percent(gap, base, method), _share(gap, paper, method)]
        if _has_accuracy(task):
            accuracy = Spread.of(results.values(task, method.name, lr, "accuracy"))
            row.append(points(accuracy, sign=False))
            row.append(
                _NONE
                if method.name == method.baseline
                else points(results.tuned_gap(task, method.name, "accuracy"))
            )
        rows.append([*row, str(loss.count if loss else 0)])
    header = ["method", "lr", "held-out loss", "above AdamW", "in %", "of the paper's gap"]
    if _has_accuracy(task):
        header += ["accuracy, %", "points above AdamW"]
    return markdown([*header, "runs"], rows)


def group_table(results: Results, task: str, group: str) -> str:
    """Each method of a group, at each learning rate: held-out loss above its baseline's."""
    lrs = TASKS[task].lrs
    accuracy = _has_accuracy(task)
    rows = []
    for method in [METHODS["s4"], *_in(group)]:
        if not any(results.of(task, method.name, lr) for lr in lrs):
            continue
        row = [method.label]
        for lr in lrs:
            own = method.name == method.baseline or method.name == "adamw-no-clip"
            row.append(_NONE if own else plus_minus(results.gap(task, method.name, lr)))
        if accuracy:
            middle = TASKS[task].middle
            row.append(points(results.gap(task, method.name, middle, "accuracy")))
        rows.append(row)
    if len(rows) < 2:
        return ""
    header = ["method", *(f"lr {lr:g}" for lr in lrs)]
    return markdown([*header, f"accuracy points, lr {TASKS[task].middle:g}"][: len(rows[0])], rows)


def groups(results: Results, task: str) -> str:
    """All groups of a task, with headings."""
    adamw = ", ".join(
        f"{plus_minus(Spread.of(results.values(task, 'adamw', lr)), sign=False)} at {lr:g}"
        for lr in TASKS[task].lrs
    )
    parts = [f"AdamW's own held-out loss: {adamw}."]
    for group, title in GROUPS.items():
        table = group_table(results, task, group)
        if table:
            parts.append(f"**{title}**\n\n{table}")
    return "\n\n".join(parts)


def plus_minus(spread: Spread | None, *, sign: bool = True) -> str:
    """Mean and deviation with four decimals."""
    if spread is None:
        return _NONE
    if not math.isfinite(spread.mean):
        return "diverged"
    text = f"{spread.mean:+.4f}" if sign else f"{spread.mean:.4f}"
    return text + (f" ± {spread.deviation:.4f}" if spread.deviation is not None else "")


def points(spread: Spread | None, *, sign: bool = True) -> str:
    """Mean and deviation of a share, in percent."""
    if spread is None or not math.isfinite(spread.mean):
        return _NONE
    text = f"{100 * spread.mean:+.2f}" if sign else f"{100 * spread.mean:.2f}"
    return text + (f" ± {100 * spread.deviation:.2f}" if spread.deviation is not None else "")


def _gap(gap: Spread | None, method: Method) -> str:
    return _NONE if method.name == method.baseline else plus_minus(gap)


def _percent(gap: Spread | None, base: Spread | None, method: Method) -> str:
    if gap is None or base is None or method.name == method.baseline:
        return _NONE
    return f"{100 * gap.mean / base.mean:+.2f}"


def _share(gap: Spread | None, paper: Spread | None, method: Method) -> str:
    if gap is None or paper is None or paper.mean <= 0 or method.name == method.baseline:
        return _NONE
    return f"{gap.mean / paper.mean:.2f}"


def _in(group: str) -> list[Method]:
    return [method for method in METHODS.values() if method.group == group]


def _has_accuracy(task: str) -> bool:
    return task == "B"
