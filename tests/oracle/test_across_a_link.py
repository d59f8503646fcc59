"""Compact host state, slots and staging from the pool, real threads: the oracle's bits again."""

import random
from typing import Any

import pytest
import torch
from links import use_platform
from runs import PRODUCT, Run, compare
from torch import Tensor

import zenflow
from zenflow.core.channels import ChannelMap
from zenflow.runtime.slots import BufferPool

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = sorted(random.Random(1).sample(range(len(PRODUCT)), 60))


def compare_all() -> None:
    for number in NUMBERS:
        compare(Run.at(number))


@pytest.mark.parametrize("number", NUMBERS)
def test_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = use_platform(monkeypatch, link=True)
    compare(Run.at(number))
    assert platforms


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("number", NUMBERS[::4])
def test_nothing_is_read_from_a_buffer_that_was_given_back(
    number: int, link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each buffer is filled with NaN as soon as it returns to the pool."""
    use_platform(monkeypatch, link=link)
    release = BufferPool.release
    released = []

    def poison(pool: BufferPool, buffer: Tensor) -> None:
        buffer.fill_(float("nan"))
        released.append(buffer.numel())
        release(pool, buffer)

    monkeypatch.setattr(BufferPool, "release", poison)
    compare(Run.at(number))
    assert released or Run.at(number).point["topk_ratio"] == 1


def test_a_buffer_given_back_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot's and every staging's buffer is handed out again while it is still in use."""
    use_platform(monkeypatch, link=True)
    acquire = BufferPool.acquire

    def acquire_shared(pool: BufferPool, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        buffer = acquire(pool, shape, dtype)
        pool._free[shape.numel(), dtype].append(pool._in_use[buffer.data_ptr()])
        return buffer

    monkeypatch.setattr(BufferPool, "acquire", acquire_shared)
    monkeypatch.setattr(BufferPool, "release", lambda *_: None)
    with pytest.raises(AssertionError, match="weight"):
        compare_all()


def test_a_handover_from_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_platform(monkeypatch, link=True)
    handover_to = ChannelMap.handover_to

    def shifted(channels: ChannelMap, chosen: Tensor) -> Any:
        handover = handover_to(channels, chosen)
        if handover is not None:
            object.__setattr__(handover, "host_from", handover.host_from.roll(1))
        return handover

    monkeypatch.setattr(ChannelMap, "handover_to", shifted)
    with pytest.raises(AssertionError, match="weight"):
        compare_all()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 4, "auto"])
def test_all_host_buffers_are_reserved_before_the_first_step(
    interval: int | str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool takes no memory while training, nor to synchronize."""
    use_platform(monkeypatch, link=True)
    params = [torch.nn.Parameter(torch.randn(rows, 300)) for rows in (40, 700, 40, 64, 64)]
    config = {
        "update_interval": interval,
        "select_interval": 2,
        "stream_gradients": streaming,
        "host_threads": 1,
    }
    optimizer = zenflow.ZenFlowAdamW(params, config=config)
    taken = []
    for step in range(14):
        sum((param * param).sum() for param in params).backward()
        optimizer.step()
        taken.append(optimizer._engine.pipeline.pool.allocated_bytes)
        if step == 9:
            optimizer.synchronize()
    optimizer.close()
    assert taken[0] > 0
    assert set(taken) == {taken[0]}
