"""Carry out what the page observes; one JSON file for each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.observations import columns, staleness
from benchmarks.convergence.observations.energies import record
from benchmarks.convergence.runner import prepare
from benchmarks.convergence.settings import TASKS
from benchmarks.convergence.tasks import make_task


def observe_all(results: Path, cache: Path, only: list[str], say: Callable[[str], None]) -> None:
    """Write what is missing; ``only`` holds names of tasks, or ``staleness``."""
    torch.set_num_threads(1)
    folder = results / "observations"
    folder.mkdir(parents=True, exist_ok=True)
    for name in only or [*TASKS, "staleness"]:
        path = folder / f"{name}.json"
        if path.exists():
            continue
        say(f"observing {name}")
        found = staleness.observe() if name == "staleness" else _of_task(name, cache, say)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(f"wrote {path.name}")


def _of_task(name: str, cache: Path, say: Callable[[str], None]) -> dict[str, Any]:
    prepare(cache, [name], say)
    recorded = record(make_task(name, cache), cache)
    return {
        "skew": columns.skew(recorded),
        "stability": columns.stability(recorded),
        "fidelity": columns.fidelity(recorded),
    }
