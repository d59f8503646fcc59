"""Checkpoints of the trainer and which of them are whole.

The trainer writes a checkpoint file by file. One that was interrupted looks much like a whole one,
so each is sealed when it is done, with the sizes of its files; only sealed ones are resumed.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow.cli.finetune.outputs import write_json

_SEAL = "zenflow_seal.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: where, after which step, and the run's figures up to there."""

    path: Path
    step: int
    totals: dict[str, Any]


def seal(path: Path, totals: dict[str, Any]) -> None:
    """Mark a checkpoint as whole, once the trainer has written all of it."""
    write_json(path / _SEAL, {"files": _sizes(path), "totals": totals})


def newest_whole(checkpoints: Path) -> Checkpoint | None:
    """The last checkpoint in a directory that is whole, or None."""
    whole = [found for path in _all(checkpoints) if (found := _read(path)) is not None]
    return max(whole, key=lambda checkpoint: checkpoint.step, default=None)


def discard_broken(checkpoints: Path) -> list[str]:
    """Delete the checkpoints that are not whole; the names of those deleted."""
    broken = [path for path in _all(checkpoints) if _read(path) is None]
    for path in broken:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in broken]


def _all(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return sorted(path for path in checkpoints.iterdir() if _NAME.match(path.name))


def _read(path: Path) -> Checkpoint | None:
    try:
        content = json.loads((path / _SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sizes = _sizes(path)
    if any(sizes.get(name) != size for name, size in content["files"].items()):
        return None
    match = _NAME.match(path.name)
    assert match is not None
    return Checkpoint(path, int(match[1]), content["totals"])


def _sizes(path: Path) -> dict[str, int]:
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.startswith(_SEAL)
    }
