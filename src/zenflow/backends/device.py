"""The device: where the weights live and the model computes."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zenflow.backends.streams import Streams, streams_of
from zenflow.backends.ticket import FINISHED, Ticket


class Device(Protocol):
    """Four methods: start work, mark a point behind it, look at a small result, make room.

    All device work of the runtime goes through :meth:`run`, in the order of the calls, behind
    whatever the model has enqueued. Only :meth:`read` and a mark's ``wait()`` block.
    """

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Enqueue ``function(*args)``. It writes into tensors it is given and returns nothing."""
        ...

    def mark(self) -> Ticket:
        """A ticket for everything enqueued so far, the model's own work included."""
        ...

    def read(self, tensor: Tensor) -> Tensor:
        """The host's copy of a small device tensor, once everything enqueued so far has run."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, reusable by the device once the last reference is
        dropped."""
        ...


class CpuDevice:
    """The CPU as the device: work runs in the calling thread, at once."""

    def run(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def mark(self) -> Ticket:
        return FINISHED

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class AcceleratorDevice:
    """A CUDA-like device, through the calling thread's current stream.

    Args:
        device: an accelerator device with an index, the weights' own.
        streams: its streams; to be found if not given.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = streams or streams_of(device)

    def run(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def mark(self) -> Ticket:
        """See :meth:`Device.mark`.

        Raises:
            RuntimeError: if the stream is being captured into a graph.
        """
        return EventTicket(self._streams.record(self._streams.current()))

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


class EventTicket:
    """A point in a stream."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()
