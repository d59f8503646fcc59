"""The link between device memory and host memory."""

from typing import Protocol

import torch
from torch import Tensor

from zenflow.backends.device import EventTicket
from zenflow.backends.ticket import FINISHED, Ticket, Transfer


class Link(Protocol):
    """Two directions and a fact.

    A copy starts when its ``after`` ticket is done, runs beside compute, and is finished when the
    returned transfer's ticket is done. Copies of one direction finish in the order asked for.

    Attributes:
        shared: device and host share memory. Then nothing is copied and ``target`` is not used: the
            source itself is what the other side reads.
    """

    shared: bool

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        """Copy device ``source`` into host ``target`` of the same shape and dtype."""
        ...

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        """Copy host ``source`` into device ``target`` of the same shape and dtype. Any thread."""
        ...


class SharedLink:
    """Device memory is host memory (the CPU as the device)."""

    shared = True

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return Transfer(source, source, FINISHED)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return Transfer(source, source, FINISHED)


class StreamLink:
    """One side stream for each direction of an accelerator's link, created once.

    Memory that a copy uses was allocated on the compute stream. The transfer keeps both ends alive
    until the copy is done, and the copy waits for ``after`` before it touches either.
    """

    shared = False

    def __init__(self, device: torch.device) -> None:
        self._to_host = torch.Stream(device)
        self._to_device = torch.Stream(device)

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return _copy(self._to_host, source, target, after)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return _copy(self._to_device, source, target, after)


def _copy(stream: torch.Stream, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
    assert target is not None, "a link between two memories needs a target"
    if isinstance(after, EventTicket):
        stream.wait_event(after.event)
    else:
        after.wait()
    with stream:
        target.copy_(source, non_blocking=True)
    event = torch.Event(stream.device)
    event.record(stream)
    return Transfer(target, source, EventTicket(event))
