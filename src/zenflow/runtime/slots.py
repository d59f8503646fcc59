"""Slots and the pool that their host buffers come from."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.backends.ticket import Ticket
from zenflow.core.rules import SubStep


class BufferPool:
    """Host buffers that cross the link, reused by element count and dtype.

    It grows to the most that are in use at once, which the schedule bounds, and then allocates no
    more.

    Args:
        allocate: makes a new buffer of a shape and dtype.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._in_use: dict[int, Tensor] = {}
        self.allocated_bytes = 0

    def acquire(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        free = self._free[shape.numel(), dtype]
        if free:
            flat = free.pop()
        else:
            flat = self._allocate((shape.numel(),), dtype)
            self.allocated_bytes += flat.numel() * flat.element_size()
        self._in_use[flat.data_ptr()] = flat
        return flat.view(shape)

    def release(self, buffer: Tensor) -> None:
        flat = self._in_use.pop(buffer.data_ptr())
        self._free[flat.numel(), flat.dtype].append(flat)


class Captured(NamedTuple):
    """A segment's share of one gradient, before its step is known to be applied.

    Attributes:
        grad: of the segment's host shape, readable once ``ticket`` is done.
        buffer: what returns to the pool after the sweep; None where the gradient itself is the slot.
    """

    grad: Tensor
    ticket: Ticket
    buffer: Tensor | None


class Slot(NamedTuple):
    """One applied step's gradient of one segment, on its way to host memory or there.

    Attributes:
        step: the applied step that produced it.
        substep: the hyperparameters it was produced under.
    """

    step: int
    substep: SubStep
    grad: Tensor
    ticket: Ticket
    buffer: Tensor | None
