"""Writes the selection log while training runs."""

import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.selection_log import VERSION, score_energy
from zenflow.runtime.processes import is_first_process

_log = logging.getLogger("zenflow")


def with_selection_log(config: ZenFlowConfig) -> ZenFlowConfig:
    """The config with its log's place as it now is, whatever the working directory is later.

    Raises:
        ValueError: with the reason, if this process would write it and could not.
    """
    if config.selection_log is None:
        return config
    path = Path(os.path.abspath(os.path.expanduser(config.selection_log)))
    if is_first_process() and (reason := _what_hinders(path)) is not None:
        raise ValueError(f"selection_log={str(path)!r} cannot be written: {reason}")
    return replace(config, selection_log=path)


def _what_hinders(path: Path) -> str | None:
    folder = path.parent
    try:
        if not folder.is_dir():
            return f"the folder {str(folder)!r} does not exist; create it first"
        if path.exists() and not path.is_file():
            return "it is not a file; name a file in it, such as selection.jsonl"
        if not os.access(path if path.exists() else folder, os.W_OK):
            return "no permission to write there"
        with suppress(FileNotFoundError):
            path.lstat()
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:  # a null byte
        return str(error)
    return None


class SelectionWriter:
    """Appends to one file; the first process of a group does. What cannot be written is given up, with
    a warning: training goes on.

    Args:
        config: says where, if anywhere.
    """

    def __init__(self, config: ZenFlowConfig) -> None:
        self._config = config
        self.is_on = config.selection_log is not None and is_first_process()
        self._file: TextIO | None = None
        self._last: dict[str, tuple[int, Tensor]] = {}
        self._begun: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._interval: int | None = None

    def begun(self, weight: str, step: int, energy_C: Tensor, chosen: Tensor) -> None:
        """As :meth:`scored`, of a step that may yet be dropped; written when it was applied."""
        self._begun[weight] = step, energy_C, chosen

    def forget(self, weight: str) -> None:
        """Its gradient of a step that is not applied yet was dropped."""
        self._begun.pop(weight, None)

    def scored(self, weight: str, step: int, energy_C: Tensor, chosen: Tensor) -> None:
        """A weight's channels were chosen by the gradient of ``step``; both tensors on the host."""
        last_step, last = self._last.get(weight, (None, None))
        row = score_energy(energy_C, chosen, last)
        self._last[weight] = step, chosen
        if row is not None:
            if last_step is not None:
                row["before"] = last_step
            self._write({"step": step, "weight": weight, **row})

    def stepped(self, step: int, update_interval: int) -> None:
        """A step was applied."""
        for weight, scored in self._begun.items():
            self.scored(weight, *scored)
        self._begun.clear()
        if self.is_on and update_interval != self._interval:
            self._interval = update_interval
            self._write({"step": step, "update_interval": update_interval})

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            with suppress(OSError):  # said when it was written
                self._file.close()
            self._file = None

    def _write(self, row: dict[str, Any]) -> None:
        if not self.is_on:
            return
        try:
            if self._file is None:
                self._file = self._open(row["step"] - 1)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            self.is_on = False
            _log.warning("the selection log ends here: %s", error)

    def _open(self, step: int) -> TextIO:
        assert self._config.selection_log is not None
        path = Path(self._config.selection_log)
        # A line that a stopped process has left unfinished must not swallow the head.
        start = "\n" if _is_cut_off(path) else ""
        head = {"zenflow": VERSION, "step": step, "topk_ratio": self._config.topk_ratio}
        file = path.open("a", encoding="utf-8")
        file.write(start + json.dumps(head) + "\n")
        return file


def _is_cut_off(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.readline() != b"\n"
