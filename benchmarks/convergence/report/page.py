"""docs/convergence.md: the prose of convergence.md.in with tables, and the plots beside it."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.report import svg, tables
from benchmarks.convergence.report.observations import Observations, interval_plot
from benchmarks.convergence.report.results import Results, Spread
from benchmarks.convergence.settings import TASKS

TEMPLATE = Path(__file__).with_name("convergence.md.in")


def write_report(folder: Path, docs: Path, say: Callable[[str], None]) -> None:
    """Write the page and the plots that results are there for."""
    results = Results(folder)
    files = files_of(results, Observations(folder / "observations"))
    for name, content in files.items():
        target = docs / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(content, encoding="utf-8", newline="\n")
    say(f"wrote {', '.join(files)} from {len(results.all)} results")
    if results.num_outdated:
        say(f"{results.num_outdated} results belong to other settings and were left out")


def files_of(results: Results, observations: Observations) -> dict[str, str]:
    """Every file of the report, by its name under docs/."""
    plots = {"convergence/interval.svg": interval_plot(results), **observations.plots()}
    for task in TASKS:
        plots[f"convergence/gaps_{task}.svg"] = gap_plot(results, task)
        plots[f"convergence/lr_{task}.svg"] = lr_plot(results, task)
    plots = {name: text for name, text in plots.items() if text}

    def plot(name: str, *title: str) -> str:
        words = " ".join(title)
        return f"![{words}]({name})" if name in plots else f"({words}: no results)"

    fillers: dict[str, Callable[..., str]] = {
        "main": partial(tables.main_table, results),
        "groups": partial(tables.groups, results),
        "plot": plot,
        "skew": observations.skew_table,
        "stability": observations.stability_table,
        "fidelity": observations.fidelity_table,
        "slopes": observations.slopes_table,
        "count": lambda: str(len(results.all)),
        "versions": partial(_versions, results),
    }

    def filled(match: re.Match[str]) -> str:
        kind, *words = match[1].split()
        return fillers[kind](*words)

    page = re.sub(r"\{\{(.*?)\}\}", filled, TEMPLATE.read_text(encoding="utf-8"))
    return {"convergence.md": page, **plots}


def gap_plot(results: Results, task: str) -> str:
    """Held-out loss above AdamW's at the middle learning rate, all methods."""
    lr = TASKS[task].middle
    rows: list[svg.Row] = []
    for group, title in {"main": "Main", **tables.GROUPS}.items():
        methods = [m for m in METHODS.values() if m.group == group and m.name != m.baseline]
        found = [
            svg.Row(_plain(m.label), gap.mean, gap.deviation or 0.0)
            for m in methods
            if (gap := results.gap(task, m.name, lr)) is not None and abs(gap.mean) < 10
        ]
        if found:
            rows += [svg.Row(title, heading=True), *found]
    if not rows:
        return ""
    return svg.dots(
        f"Task {task}: what each method costs, lr {lr:g}",
        rows,
        x_label="held-out loss above the baseline's",
    )


def lr_plot(results: Results, task: str) -> str:
    """Held-out loss against the learning rate, main methods."""
    series = []
    for method in METHODS.values():
        if method.group != "main":
            continue
        points = []
        for lr in TASKS[task].lrs:
            loss = Spread.of(results.values(task, method.name, lr))
            if loss is not None and abs(loss.mean) < 100:
                points.append((lr, loss.mean))
        if len(points) > 1:
            series.append(svg.Series(method.name, points))
    if not series:
        return ""
    return svg.lines(
        f"Task {task}: held-out loss by learning rate",
        series,
        x_label="learning rate",
        y_label="held-out loss",
        log_x=True,
    )


def _plain(label: str) -> str:
    return label.replace("`", "")


def _versions(results: Results) -> str:
    names = ("python", "torch", "transformers", "machine")
    found = {tuple(r["environment"][n] for n in names) for r in results.all}
    return "; ".join(
        f"Python {v[0]}, torch {v[1]}, transformers {v[2]} on {v[3]}" for v in sorted(found)
    )
