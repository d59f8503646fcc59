"""Streams and events of an accelerator, used in the way that several threads may use them at once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Streams(Protocol):
    """Four methods: the ones that differ between accelerators.

    A stream is entered by :meth:`use` and never by ``with stream``: that keeps what to restore in the
    stream object itself, so two threads that enter one stream at once fail (torch 2.11) or restore
    each other's stream (later; pytorch/pytorch#176560).
    """

    def create(self) -> torch.Stream:
        """A stream beside all others."""
        ...

    def current(self) -> torch.Stream:
        """The calling thread's stream, that of a hook inside of a hook.

        Raises:
            RuntimeError: if it is being captured into a graph.
        """
        ...

    def record(self, stream: torch.Stream) -> torch.Event:
        """A new event behind everything enqueued on ``stream`` so far; waiting for it sleeps, where
        that is possible."""
        ...

    def use(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Enqueue the calling thread's work on ``stream``."""
        ...


class CudaStreams:
    """CUDA and ROCm."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self) -> torch.Stream:
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.Stream:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ZenFlowAdamW waits for the host in each step and cannot be captured into a CUDA "
                "graph: capture the forward and backward passes alone, call step() outside of the "
                "capture, and leave stream_gradients off"
            )
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        # torch.Event ignores blocking=True: its waits spin, and a worker's wait would take a core.
        event = torch.cuda.Event(enable_timing=False, blocking=True)
        event.record(stream)
        return event

    def use(self, stream: torch.Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)


class AcceleratorStreams:
    """Any accelerator, through ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self) -> torch.Stream:
        return torch.Stream(self._device)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._device, enable_timing=False)
        event.record(stream)
        return event

    @contextmanager
    def use(self, stream: torch.Stream) -> Iterator[None]:
        with torch.accelerator.device_index(self._device.index):
            before = torch.accelerator.current_stream(self._device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)


def streams_of(device: torch.device) -> Streams:
    """The streams of an accelerator device with an index."""
    return CudaStreams(device) if device.type == "cuda" else AcceleratorStreams(device)
