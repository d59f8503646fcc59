"""Device memory as a stream-ordered allocator hands it out.

Dropping the last reference to a tensor frees its memory at once, although work that uses it may
still be queued; the next owner of that size gets it. Behind each other on the compute stream that is
safe. Whoever uses it on another stream must have waited, or kept the tensor.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_POISON_BYTE = 0xFF
"""Makes NaN in every floating dtype, and -1, which is no index, in every integer dtype."""


def poison_(tensor: Tensor) -> None:
    """Overwrite a contiguous tensor with what nobody can mistake for data."""
    assert tensor.is_contiguous()
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(_POISON_BYTE)


class Block:
    """Some bytes of device memory and how often they were handed out."""

    def __init__(self, num_bytes: int) -> None:
        self.content = bytearray([_POISON_BYTE]) * num_bytes
        self.owner = 0
        self.in_use = False


class Reference:
    """What queued work holds of a tensor: the memory, not the ownership."""

    def __init__(self, raw: Tensor, block: Block | None) -> None:
        self.raw = raw
        self._block = block
        self._owner = 0 if block is None else block.owner

    @property
    def alive(self) -> bool:
        """Whether the tensor still exists, so that its memory cannot have gone to another."""
        block = self._block
        return block is None or (block.in_use and block.owner == self._owner)


class DeviceMemory:
    """Blocks by size. New ones hold poison, used ones what their last owner left.

    Attributes:
        allocated_bytes: taken so far; a steady state takes no more.
        in_use_bytes: of tensors that exist.
        peak_bytes: the most of them so far; may be set back.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        free = self._free[num_bytes]
        block = free.pop() if free else self._new_block(num_bytes)
        block.in_use = True
        block.owner += 1
        self.in_use_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        owner = memoryview(block.content)  # lives as long as the tensor's storage, views included
        weakref.finalize(owner, self._release, block).atexit = False
        return torch.frombuffer(owner, dtype=dtype).view(tuple(shape))

    def reference(self, tensor: Tensor) -> Reference:
        """A tensor's memory for queued work, without keeping device memory alive."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or not tensor.numel():
            return Reference(tensor.data, None)  # .data: writes do not count as the caller's
        whole = torch.frombuffer(block.content, dtype=tensor.dtype)
        raw = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Reference(raw, block)

    def raw(self, value: Any) -> Any:
        """``value`` with every tensor in it, however deep in lists and tuples, as raw memory."""
        if isinstance(value, Tensor):
            return self.reference(value).raw
        if isinstance(value, tuple):
            parts = [self.raw(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return [self.raw(part) for part in value]
        return value

    def _new_block(self, num_bytes: int) -> Block:
        block = Block(num_bytes)
        self.allocated_bytes += num_bytes
        self._blocks[torch.frombuffer(block.content, dtype=torch.uint8).data_ptr()] = block
        return block

    def _release(self, block: Block) -> None:
        block.in_use = False
        self.in_use_bytes -= len(block.content)
        self._free[len(block.content)].append(block)
