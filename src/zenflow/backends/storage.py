"""Where host memory comes from and where optimizer state rests between sweeps."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zenflow.backends.host_kernel import HostState

_log = logging.getLogger("zenflow")


class Storage(Protocol):
    """Four methods. State is fetched and stored segment by segment, so that it may rest on a
    disk."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory fit to cross the link."""
        ...

    def create(self, key: int, shape: Sequence[int]) -> None:
        """Make room for a segment's state, all zero."""
        ...

    def fetch(self, key: int) -> HostState:
        """The segment's state, to read and write until it is stored. One holder at a time."""
        ...

    def store(self, key: int, state: HostState) -> None:
        """Put back what :meth:`fetch` gave."""
        ...


class RamStorage:
    """State in host memory; link buffers pinned when an accelerator is there and allows it."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._states: dict[int, HostState] = {}

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._pin:
            try:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                _log.warning(
                    "pinned host memory was refused (%s); using pageable memory: "
                    "copies are slower and do not overlap compute",
                    error,
                )
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def create(self, key: int, shape: Sequence[int]) -> None:
        self._states[key] = HostState(
            *(torch.zeros(tuple(shape), dtype=torch.float32, device="cpu") for _ in range(3))
        )

    def fetch(self, key: int) -> HostState:
        return self._states[key]

    def store(self, key: int, state: HostState) -> None:
        self._states[key] = state
