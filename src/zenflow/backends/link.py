"""The link between device memory and host memory."""

from typing import Protocol

import torch
from torch import Tensor

from zenflow.backends.device import EventTicket
from zenflow.backends.streams import Streams, streams_of
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

    A copy's device memory was allocated on the compute stream. The copy waits for ``after`` before it
    touches that memory, and its transfer keeps it until the copy is done.

    Args:
        device: an accelerator device with an index.
        streams: its streams; to be found if not given.
    """

    shared = False

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._streams = streams or streams_of(device)
        self._to_host = self._streams.create()
        self._to_device = self._streams.create()

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(self._to_host, source, target, after)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(self._to_device, source, target, after)

    def _copy(
        self, stream: torch.Stream, source: Tensor, target: Tensor | None, after: Ticket
    ) -> Transfer:
        assert target is not None, "a link between two memories needs a target"
        if isinstance(after, EventTicket):
            after.event.wait(stream)
        else:
            after.wait()
        with self._streams.use(stream):
            target.copy_(source, non_blocking=True)
        ticket = EventTicket(self._streams.record(stream))
        return StreamTransfer(target, source, ticket).on(stream)


class StreamTransfer(Transfer):
    """A copy on a side stream. Dropped before it is done, it leaves its memory in order.

    Device memory goes back to the compute stream's allocator, which would hand it out while the copy
    still reads or writes it. Told of the side stream, it waits with that for what is enqueued there at
    the time of the drop. So whoever drops a transfer at once, with the copy last in the stream,
    has the memory back as soon as the copy is done; others keep it and look. That transfers whose
    data is of no use any more are dropped early (a skipped step, an optimizer that failed or is closed
    without draining) is seen to here.
    """

    def on(self, stream: torch.Stream) -> "StreamTransfer":
        """Say which stream copies."""
        self._stream = stream
        return self

    def let_go(self) -> None:
        for tensor in (self.tensor, self.source):
            if not tensor.is_cpu:
                tensor.record_stream(self._stream)

    def __del__(self) -> None:
        if not self.ticket.done():
            self.let_go()
