"""Results by task, method, learning rate and seed, and the differences between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.plan import Run
from benchmarks.convergence.runner import results_of
from benchmarks.convergence.settings import TASKS

Values = Mapping[int, float]
"""One figure of each seed; a diverged run's is infinite."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; of one seed the deviation is not known."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Values) -> "Spread | None":
        numbers = list(values.values())
        if not numbers:
            return None
        finite = all(math.isfinite(n) for n in numbers)
        deviation = stdev(numbers) if finite and len(numbers) > 1 else None
        return cls(mean(numbers), deviation, len(numbers))


class Results:
    """All results of a folder that belong to the present settings."""

    def __init__(self, folder: Path) -> None:
        self.all: list[dict[str, Any]] = []
        self.num_outdated = 0
        for result in results_of(folder):
            if _is_current(result):
                self.all.append(result)
            else:
                self.num_outdated += 1

    def of(self, task: str, method: str, lr: float) -> list[dict[str, Any]]:
        """The results of one setting, by seed."""
        found = [r for r in self.all if (r["task"], r["method"], r["lr"]) == (task, method, lr)]
        return sorted(found, key=lambda r: r["seed"])

    def values(self, task: str, method: str, lr: float, metric: str = "loss") -> Values:
        """A held-out figure for each seed."""
        worst = math.inf if metric == "loss" else -math.inf
        return {
            r["seed"]: r.get("heldout", {}).get(metric, worst) for r in self.of(task, method, lr)
        }

    def best_lr(self, task: str, method: str) -> float | None:
        """The learning rate of lowest mean held-out loss, over the seeds that all of them have."""
        tried = {lr: v for lr in TASKS[task].lrs if (v := self.values(task, method, lr))}
        if not tried:
            return None
        seeds = set.intersection(*(set(values) for values in tried.values()))
        if not seeds:
            return None
        return min(tried, key=lambda lr: mean(tried[lr][seed] for seed in seeds))

    def gap(self, task: str, method: str, lr: float, metric: str = "loss") -> Spread | None:
        """A figure above its baseline's at the same learning rate, seed by seed."""
        base = self.values(task, METHODS[method].baseline, lr, metric)
        return difference(self.values(task, method, lr, metric), base)

    def tuned_gap(self, task: str, method: str, metric: str = "loss") -> Spread | None:
        """The same with each at its own best learning rate."""
        lr, base_lr = self.best_lr(task, method), self.best_lr(task, METHODS[method].baseline)
        if lr is None or base_lr is None:
            return None
        base = self.values(task, METHODS[method].baseline, base_lr, metric)
        return difference(self.values(task, method, lr, metric), base)


def difference(values: Values, base: Values) -> Spread | None:
    """``values - base`` over the seeds that both have."""
    return Spread.of({seed: values[seed] - base[seed] for seed in values if seed in base})


def _is_current(result: Mapping[str, Any]) -> bool:
    if result["task"] not in TASKS or result["method"] not in METHODS:
        return False
    run = Run(result["task"], result["method"], result["lr"], result["seed"])
    return bool(run.settings == result["settings"] and run.lr in TASKS[run.task].lrs)
