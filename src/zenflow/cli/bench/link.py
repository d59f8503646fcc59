"""A link of a set rate in real time, between two parts of host memory."""

import ctypes
import threading
import time
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from zenflow.backends.ticket import Ticket, Transfer


class EventTicket:
    """Work of a lane."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.wait()


class _Copy(NamedTuple):
    source: Tensor
    target: Tensor
    after: Ticket
    ticket: EventTicket


class RatedLink:
    """One thread for each direction: copies, then sleeps until the rate allows the copy's end.

    A real link copies by itself. Here the copy takes CPU time, about a tenth of a nanosecond a byte,
    which is the accelerator's share of the work done by the host: figures with a link are upper bounds.

    Args:
        bytes_per_s: of each direction.
    """

    shared = False

    def __init__(self, bytes_per_s: float) -> None:
        self._lanes = [_Lane(bytes_per_s) for _ in range(2)]

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._lanes[0].copy(source, target, after)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._lanes[1].copy(source, target, after)

    def close(self) -> None:
        """End the threads once they have done what was asked."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="bench-link", daemon=True)
        self._thread.start()

    def copy(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        assert target is not None, "a link between two memories needs a target"
        ticket = EventTicket()
        self._queue.put(_Copy(source, target, after, ticket))
        return Transfer(target, source, ticket)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        free_s = 0.0
        while (copy := self._queue.get()) is not None:
            copy.after.wait()
            begin_s = max(free_s, time.perf_counter())
            _copy_bytes(copy.source, copy.target)
            free_s = begin_s + copy.source.nbytes / self._bytes_per_s
            remaining_s = free_s - time.perf_counter()
            if remaining_s > 0:
                time.sleep(remaining_s)
            copy.ticket.set()
            del copy


def _copy_bytes(source: Tensor, target: Tensor) -> None:
    """In this thread alone: torch would copy with a thread pool of its own."""
    assert (source.shape, source.dtype) == (target.shape, target.dtype)
    if source.is_contiguous() and target.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
