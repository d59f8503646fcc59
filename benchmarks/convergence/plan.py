"""Which runs there are, what each is called, and in which order they are worth their time."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.convergence.methods import METHODS, Method
from benchmarks.convergence.settings import TASKS, digest


@dataclass(frozen=True)
class Run:
    """One run; the names are keys of ``TASKS`` and ``METHODS``."""

    task: str
    method: str
    lr: float
    seed: int

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    @property
    def settings(self) -> str:
        """A hash of all that changes what the run computes, but for lr and seed."""
        return digest([TASKS[self.task].identity, self.how.identity])

    @property
    def file_name(self) -> str:
        return f"{self.task}_{self.method}_lr{self.lr:g}_seed{self.seed}_{self.settings}.json"

    def path(self, results: Path) -> Path:
        """Where its result is, or is to be."""
        return results / self.file_name


def all_runs() -> list[Run]:
    """Every run, the most valuable first.

    First the main methods at each learning rate, one seed of all tasks after the other; then the
    other methods at the middle learning rate, in the same order; then those at the others.
    """
    return [*_stage("main", "all"), *_stage("ablation", "middle"), *_stage("ablation", "others")]


def _stage(stage: str, lrs: str) -> list[Run]:
    runs = []
    for seed in range(max(task.seeds for task in TASKS.values())):
        for task in TASKS.values():
            if seed >= task.seeds:
                continue
            wanted = {
                "all": task.lrs,
                "middle": (task.middle,),
                "others": tuple(lr for lr in task.lrs if lr != task.middle),
            }[lrs]
            runs += [
                Run(task.name, method.name, lr, seed)
                for method in METHODS.values()
                if (method.group == "main") == (stage == "main") and method.runs_on(task.name)
                for lr in sorted(wanted, key=lambda lr, middle=task.middle: lr != middle)
            ]
    return runs


def chosen(runs: list[Run], only: list[str]) -> list[Run]:
    """Runs of the given ``TASK`` or ``TASK:METHOD``; all if none is given.

    Raises:
        ValueError: for a name that is unknown.
    """
    if not only:
        return runs
    kept: list[tuple[str, str | None]] = []
    for name in only:
        task, _, method = name.partition(":")
        if task not in TASKS or (method and method not in METHODS):
            raise ValueError(
                f"{name!r} is not TASK or TASK:METHOD; tasks: {', '.join(TASKS)}; "
                f"methods: {', '.join(METHODS)}"
            )
        kept.append((task, method or None))
    return [r for r in runs if (r.task, None) in kept or (r.task, r.method) in kept]
