"""What the tests of ``zenflow finetune`` share besides fixtures."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zenflow

TEXT = "".join(
    f"Section {n}.\n\nThe value of item {n} is {n * 7}. It follows item {n - 1}.\n\n"
    for n in range(120)
)


@dataclass(frozen=True)
class Result:
    """What a run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("zenflow:")]


Cli = Callable[..., Result]


def start_process(*arguments: object, cwd: Path) -> "subprocess.Popen[str]":
    """The command in a process of its own."""
    source = str(Path(zenflow.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "zenflow.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))
