"""Host buffers are cut from a few large allocations, made once."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from zenflow.core import schedule
from zenflow.core.segments import plan_segments
from zenflow.runtime.slots import BufferPool


class PinnedAllocator:
    """Rounds every allocation up to a power of two, as torch's does for pinned memory."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.sizes.append(1 << (num_bytes - 1).bit_length())
        return torch.empty(tuple(shape), dtype=dtype)  # untouched: takes no memory


def counts_of_a_model(interval: int) -> dict[tuple[int, torch.dtype], int]:
    """A Llama-shaped model of 1.2 B, k = 10%."""
    shapes = [(32000, 2048), (2048, 2048), (5632, 2048), (2048, 5632)]
    weights = [shapes[0], *[shapes[1]] * 4, *[shapes[2]] * 2, shapes[3]]
    weights = [weights[0], *weights[1:] * 20, weights[0]]
    blocks = plan_segments(weights)
    phases = schedule.phases([block.numel for block in blocks], interval)
    kinds: dict[tuple[int, torch.dtype], list[int]] = {}
    for block, phase in zip(blocks, phases, strict=True):
        deferred = round(0.9 * weights[block.weight][1])
        kinds.setdefault(((block.stop - block.start) * deferred, torch.bfloat16), []).append(phase)
    return {
        kind: schedule.most_buffers(of, interval, streaming=False) for kind, of in kinds.items()
    }


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_slabs_lose_a_few_percent_to_rounding(interval: int) -> None:
    counts = counts_of_a_model(interval)
    needed = sum(numel * 2 * count for (numel, _), count in counts.items())
    allocator = PinnedAllocator()
    BufferPool(allocator).reserve(counts)
    assert sum(allocator.sizes) < 1.08 * needed
    assert len(allocator.sizes) < 20
    one_by_one = PinnedAllocator()
    for (numel, dtype), count in counts.items():
        for _ in range(count):
            one_by_one((numel,), dtype)
    assert sum(one_by_one.sizes) > 1.2 * needed


def test_what_was_reserved_is_used_before_more_is_taken() -> None:
    allocator = PinnedAllocator()
    pool = BufferPool(allocator)
    pool.reserve({(1000, torch.bfloat16): 3, (10, torch.float32): 2})
    taken, before = pool.allocated_bytes, len(allocator.sizes)
    buffers = [pool.acquire(torch.Size((10, 100)), torch.bfloat16) for _ in range(3)]
    buffers += [pool.acquire(torch.Size((10,)), torch.float32) for _ in range(2)]
    assert (pool.allocated_bytes, len(allocator.sizes)) == (taken, before)
    pool.acquire(torch.Size((10,)), torch.float32)
    assert pool.allocated_bytes == taken + 40
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    for number, buffer in enumerate(buffers):  # nobody shares memory
        assert (buffer == number).all()
        pool.release(buffer)


def test_nothing_is_reserved_for_nothing() -> None:
    allocator = PinnedAllocator()
    BufferPool(allocator).reserve({})
    assert allocator.sizes == []


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("streaming", [False, True])
def test_most_buffers_is_what_a_run_of_the_schedule_reaches(interval: int, streaming: bool) -> None:
    phases = [0, 0, 1 % interval, 2 % interval, interval - 1]
    waiting, in_flight = [0] * len(phases), [0] * len(phases)
    most = 0
    for step in range(1, 6 * interval):
        if streaming:  # gradients come while the last step's sweeps are unpublished
            waiting = [n + 1 for n in waiting]
            most = max(most, sum(waiting) + sum(in_flight))
        in_flight = [0] * len(phases)
        if not streaming:
            waiting = [n + 1 for n in waiting]
        for i, phase in enumerate(phases):
            if step % interval == phase:
                in_flight[i], waiting[i] = waiting[i] + 1, 0
        most = max(most, sum(waiting) + sum(in_flight))
    assert most == schedule.most_buffers(phases, interval, streaming=streaming)
