"""Ctrl-C and SIGTERM while training: stop after the running step, with a checkpoint."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTE = b"\nzenflow: stopping after this step, then saving a checkpoint (Ctrl-C again: at once)\n"


class StopRequest:
    """While entered, the first signal is noted for the training loop; a second Ctrl-C interrupts.

    In a thread other than the main one signals stay as they are.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
        os.write(2, _NOTE)  # print may be what the signal interrupted
