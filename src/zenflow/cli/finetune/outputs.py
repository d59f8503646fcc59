"""The output directory: who may write to it, what lies where, and when a result counts as whole.

::

    DIR/run.json            what was asked; makes the directory ours
    DIR/checkpoints/        the trainer's checkpoints (see ``checkpoints``)
    DIR/config.json, ...    the model, loadable by from_pretrained(DIR); config.json comes last
    DIR/heldout.jsonl       the held-out token sequences behind heldout_loss
    DIR/selection.jsonl     the selection log, with --selection-log (see ``zenflow inspect``)
    DIR/summary.json        the figures of the finished run; written last of all
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zenflow.cli.errors import RunError, UsageError, one_line

SELECTION_LOG = "selection.jsonl"
_DEFAULT_NAME = "zenflow-output"
_MAX_NUMBERED = 1000
_LAST = "config.json"  # from_pretrained refuses a directory without it
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WRITE_WORDS = ("no space left", "file write failed", "pytorchstreamwriter", "disk quota")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """``run.json``: what the run was asked to do and what it found before training."""

    settings: dict[str, Any]
    data_digest: str
    heldout_loss_before: float | None = None
    sample_before: str | None = None
    zenflow_finetune: int = 1
    """Version of this file's layout, and the sign that the directory is ours."""


class OutputDir:
    """One run's output directory.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.selection_log = path / SELECTION_LOG
        self._record = path / "run.json"
        self._summary = path / "summary.json"
        self._created = False

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a directory that cannot be written or that holds something else. Changes nothing.

        Raises:
            UsageError: with the reason and what to do.
        """
        anchor = self.path
        while not anchor.exists() and anchor != anchor.parent:
            anchor = anchor.parent
        if not anchor.is_dir():
            raise UsageError(f"cannot write to --output {self.path}: {anchor} is not a directory")
        if not os.access(anchor, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write to --output {self.path}: no permission in {anchor}")
        if resume or not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not self._is_ours():
            raise UsageError(
                f"--output {self.path} is not empty and holds no zenflow run; choose another"
            )
        if self._has_results() and not overwrite:
            raise UsageError(
                f"--output {self.path} holds an earlier run; give --resume to continue it, "
                "--overwrite to replace it, or another directory"
            )

    def claim(self, record: RunRecord) -> None:
        """Create the directory, remove what an earlier run of ours left, write ``run.json``.

        Raises:
            UsageError: if it cannot be written.
        """
        try:
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_results()
            self.write_record(record)
        except OSError as error:
            raise UsageError(f"cannot write to --output {self.path}: {one_line(error)}") from error

    def abandon(self) -> None:
        """Remove our traces after a failure that left no result."""
        if self._is_ours() and not self._has_results():
            self._remove_results()
            self._record.unlink(missing_ok=True)
            if self._created and not any(self.path.iterdir()):
                self.path.rmdir()

    def read_record(self) -> RunRecord:
        """The record of the run in this directory.

        Raises:
            UsageError: if there is none.
        """
        try:
            return RunRecord(**json.loads(self._record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"nothing to resume in {self.path}: {one_line(error)}; --output must name the "
                "directory of an earlier run"
            ) from None

    def write_record(self, record: RunRecord) -> None:
        """Write ``run.json``, whole or not at all."""
        write_json(self._record, asdict(record))

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary directory inside, gone afterwards whatever happens.

        Raises:
            RunError: for a failed write in the block, with the reason.
        """
        self._remove_unfinished()
        staged = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.path))
        try:
            yield staged
        except Exception as error:
            if not is_write_failure(error):
                raise
            raise RunError(f"could not write to {self.path}: {_reason(error)}") from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def publish(self, staged: Path, summary: dict[str, Any]) -> None:
        """Move a staged model into place, ``config.json`` last, then write ``summary.json``."""
        names = sorted(entry.name for entry in staged.iterdir())
        names.sort(key=lambda name: name == _LAST)
        self._remove_model()
        for name in names:
            os.replace(staged / name, self.path / name)
        write_json(self._summary, {**summary, "model_files": names})

    def is_finished(self) -> bool:
        """Whether a run has ended here with its summary."""
        return self._summary.exists()

    def _is_ours(self) -> bool:
        try:
            return "zenflow_finetune" in json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False

    def _has_results(self) -> bool:
        checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.glob("checkpoint-*"))
        return self._summary.exists() or (self.path / _LAST).exists() or checkpoints

    def _remove_results(self) -> None:
        self._remove_model()
        self.selection_log.unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            shutil.rmtree(self.checkpoints)
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """What a killed process had no time to remove."""
        for leftover in self.path.glob(".unfinished-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove_model(self) -> None:
        names = [_LAST]
        if self._summary.exists():
            names += json.loads(self._summary.read_text(encoding="utf-8")).get("model_files", [])
        for name in names:  # config.json first: from here on nothing looks whole
            (self.path / name).unlink(missing_ok=True)
        self._summary.unlink(missing_ok=True)


def choose_output(given: str | None, *, resume: bool) -> Path:
    """The output directory: the one given, else the next free (or, to resume, the last) default."""
    if given is not None:
        return Path(given).expanduser()
    names = [Path(_DEFAULT_NAME)] + [Path(f"{_DEFAULT_NAME}-{n}") for n in range(2, _MAX_NUMBERED)]
    taken = [name for name in names if name.exists()]
    if resume:
        return taken[-1] if taken else names[0]
    return next(name for name in names if name not in taken)


def require_space(path: Path, need_bytes: int) -> None:
    """Refuse a run whose files would not fit.

    Raises:
        UsageError: with what is needed and what is free.
    """
    anchor = path
    while not anchor.exists():
        anchor = anchor.parent
    free_bytes = shutil.disk_usage(anchor).free
    if need_bytes > free_bytes:
        raise UsageError(
            f"not enough disk space for --output {path}: checkpoints and model need about "
            f"{need_bytes / 1e9:.2f} GB, {free_bytes / 1e9:.2f} GB are free; "
            "free some, or use --save-every 0"
        )


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, whole or not at all."""
    staged = path.with_name(path.name + ".tmp")
    try:
        staged.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def is_write_failure(error: BaseException) -> bool:
    """Whether a file could not be written: OSError's own, or how torch and safetensors say it."""
    if isinstance(error, OSError) and error.errno in _WRITE_ERRNOS:
        return True
    return any(word in str(error).lower() for word in _WRITE_WORDS)


def _reason(error: BaseException) -> str:
    if "no space left" in str(error).lower():
        return "no space left on the device"
    return one_line(error)
