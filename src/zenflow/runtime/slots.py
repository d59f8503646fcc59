"""Slots and the pool that their host buffers come from."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.backends.ticket import Ticket
from zenflow.core.rules import SubStep

_ALIGNMENT_BYTES = 128
_BUFFERS_PER_SLAB = 32
"""Bounds what is lost at a slab's end, where the next buffer does not fit, to a few percent."""


class BufferPool:
    """Host buffers that cross the link, reused by element count and dtype.

    What the schedule needs is reserved at the start, in a few slabs: pinning takes long, holds up other
    ranks in a hook, and rounds every allocation up to a power of two. The pool still grows where more
    is in use at once than was reserved, and then allocates no more.

    Args:
        allocate: makes new host memory of a shape and dtype.

    Attributes:
        allocated_bytes: taken so far.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._in_use: dict[int, Tensor] = {}
        self.allocated_bytes = 0

    def reserve(self, counts: Mapping[tuple[int, torch.dtype], int]) -> None:
        """Make room for so many more buffers of each element count and dtype."""
        buffers = [key for key, count in counts.items() for _ in range(count)]
        buffers.sort(key=_aligned_bytes, reverse=True)
        left = sum(map(_aligned_bytes, buffers))
        slabs: list[_Slab] = []
        for numel, dtype in buffers:
            size = _aligned_bytes((numel, dtype))
            slab = next((slab for slab in slabs if slab.has_room(size)), None)
            if slab is None:
                slab = _Slab(self._new((_slab_bytes(left, size),), torch.uint8))
                slabs.append(slab)
            self._free[numel, dtype].append(slab.take(numel, dtype))
            left -= size

    def acquire(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        free = self._free[shape.numel(), dtype]
        flat = free.pop() if free else self._new((shape.numel(),), dtype)
        self._in_use[flat.data_ptr()] = flat
        return flat.view(shape)

    def release(self, buffer: Tensor) -> None:
        flat = self._in_use.pop(buffer.data_ptr())
        self._free[flat.numel(), flat.dtype].append(flat)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._allocate(shape, dtype)
        self.allocated_bytes += tensor.nbytes
        return tensor


class _Slab:
    """Host memory that buffers are cut from, front to back, once."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._taken = 0

    def has_room(self, num_bytes: int) -> bool:
        return self._taken + num_bytes <= self._memory.numel()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        piece = self._memory[self._taken : self._taken + numel * dtype.itemsize].view(dtype)
        self._taken += _aligned_bytes((numel, dtype))
        return piece


def _aligned_bytes(key: tuple[int, torch.dtype]) -> int:
    numel, dtype = key
    return -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _slab_bytes(left: int, buffer: int) -> int:
    """A power of two, so that rounding takes nothing: what is left is cut into its binary digits, from
    the highest on, and the last digits are rounded up to one buffer."""
    least = _power_of_two(buffer)
    return max(least, min(_BUFFERS_PER_SLAB * least, _power_of_two(left + 1) // 2))


def _power_of_two(num_bytes: int) -> int:
    """The least one that is not below."""
    return 1 << (num_bytes - 1).bit_length()


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
