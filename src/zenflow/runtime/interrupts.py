"""Ctrl-C waits for the end of a step, so that no state is left half changed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def whole() -> Iterator[None]:
    """Hold back SIGINT until the block has ended; a second one gets through at once.

    Outside of the main thread signals are not delivered, and nothing is done.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held = _Held(previous)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        held.deliver()


class _Held:
    """Takes the first SIGINT and keeps it."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._previous = previous
        self._received: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self._received = None
            self._previous(number, frame)
            return
        self._received = (number, frame)

    def deliver(self) -> None:
        received, self._received = self._received, None
        if received is not None:
            self._previous(*received)
