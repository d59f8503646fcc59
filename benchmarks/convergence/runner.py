"""Carries out what is missing of a plan, in processes of one compute thread each."""

import json
import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.convergence import deepspeed
from benchmarks.convergence.plan import Run
from benchmarks.convergence.settings import TASKS

_MARGIN = 1.25
"""A run is started if this many times its expected time is left."""


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Every result in a folder, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


class Estimates:
    """Seconds that a run of a task takes, learnt from those before."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, task: str, seconds: float) -> None:
        self._seconds.setdefault(task, []).append(seconds)

    def of(self, task: str) -> float:
        known = self._seconds.get(task)
        return median(known[-8:]) if known else TASKS[task].expected_s


def run_all(
    runs: list[Run],
    results: Path,
    cache: Path,
    *,
    jobs: int,
    budget_s: float,
    say: Callable[[str], None],
) -> None:
    """Carry out the runs that have no result yet, as many as fit the budget.

    Args:
        jobs: processes, of one compute thread each.
    """
    results.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not run.path(results).exists()]
    say(f"{len(runs) - len(missing)} of {len(runs)} runs are done")
    here = [run for run in missing if (run.how.deepspeed is not None) == deepspeed.is_here()]
    if len(here) < len(missing):
        with_or_without = "without" if deepspeed.is_here() else "with"
        say(f"{len(missing) - len(here)} runs need an interpreter {with_or_without} DeepSpeed")
    missing = here
    if not missing:
        return
    prepare(cache, sorted({run.task for run in missing}), say)
    deadline_s = time.monotonic() + budget_s
    estimates = Estimates()
    for result in results_of(results):
        estimates.add(result["task"], result["seconds"])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin_worker) as pool:
        started: dict[Future[dict[str, Any]], Run] = {}
        waiting = _affordable(missing, estimates, deadline_s)
        finished = 0
        while True:
            while len(started) < jobs and (run := next(waiting, None)) is not None:
                started[pool.submit(_carry_out, run, results, cache)] = run
            if not started:
                break
            for future in wait(started, return_when=FIRST_COMPLETED).done:
                run = started.pop(future)
                result = future.result()
                finished += 1
                estimates.add(run.task, result["seconds"])
                say(f"[{finished}/{len(missing)}] {_line(result)}")
    left = len(missing) - finished
    say(
        f"{left} runs are left; the same command goes on with them" if left else "all runs are done"
    )


def prepare(cache: Path, tasks: list[str], say: Callable[[str], None]) -> None:
    """What tasks need and all their runs share: texts, the pretrained model, downloads."""
    if "A" in tasks or "C" in tasks:
        from benchmarks.convergence.tasks import language

        language.prepare(cache, say, pretrain="A" in tasks)
    if "B" in tasks:
        from benchmarks.convergence.tasks import reviews

        reviews.prepare(cache, say)


def _affordable(runs: list[Run], estimates: Estimates, deadline_s: float) -> Iterator[Run]:
    for run in runs:
        if time.monotonic() + _MARGIN * estimates.of(run.task) <= deadline_s:
            yield run


def _begin_worker() -> None:
    """One compute thread; and a process whose parent was stopped ends with it."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


_tasks: dict[str, Any] = {}


def _carry_out(run: Run, results: Path, cache: Path) -> dict[str, Any]:
    """In a worker process."""
    from benchmarks.convergence.tasks import make_task
    from benchmarks.convergence.training import train

    if run.task not in _tasks:
        _tasks[run.task] = make_task(run.task, cache)
    result = train(run, _tasks[run.task])
    result["environment"] = environment()
    unfinished = run.path(results).with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(run.path(results))
    return result


def environment() -> dict[str, str]:
    """Versions that a figure may depend on."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
    }


def _line(result: dict[str, Any]) -> str:
    outcome = result.get("heldout") or f"diverged at step {result['diverged_at']}"
    return (
        f"{result['task']} {result['method']} lr {result['lr']:g} seed {result['seed']}: "
        f"{outcome}, {result['seconds']:.0f} s"
    )
