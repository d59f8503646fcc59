"""Memory that goes back too early: the simulation sees it in the numbers."""

from collections.abc import Callable

import pytest
import torch
from scenarios import SCENARIOS, expected, same, simulated

from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.segment import Segment
from zenflow.runtime.slots import BufferPool
from zenflow.testing.simulated import Policy, policies
from zenflow.testing.simulated.device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("one_thread")

Break = Callable[[pytest.MonkeyPatch], None]


def slots_go_back_when_the_sweep_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    start_sweep, release = HostPipeline.start_sweep, BufferPool.release

    def too_early(self: HostPipeline, segment: Segment, delay: float) -> None:
        start_sweep(self, segment, delay)
        assert segment.sweep is not None
        for slot in segment.sweep.slots:
            assert slot.buffer is not None
            release(self.pool, slot.buffer)

    def once(self: BufferPool, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._in_use:
            release(self, buffer)

    monkeypatch.setattr(HostPipeline, "start_sweep", too_early)
    monkeypatch.setattr(BufferPool, "release", once)


def all_segments_share_their_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SimulatedDevice.empty
    kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def shared(self: SimulatedDevice, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        key = (torch.Size(shape).numel(), dtype)
        if len(shape) < 2:
            return empty(self, shape, dtype)
        return kept.setdefault(key, empty(self, shape, dtype)).view(shape)

    monkeypatch.setattr(SimulatedDevice, "empty", shared)


def gradients_are_gathered_into_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = BufferPool.acquire

    def the_last(self: BufferPool, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self._in_use and (last := list(self._in_use.values())[-1]).numel() == shape.numel():
            return last.view(shape)
        return acquire(self, shape, dtype)

    monkeypatch.setattr(BufferPool, "acquire", the_last)


POLICIES = [
    *policies(),
    *(Policy(compute="random", links="random", workers="random", seed=seed) for seed in range(8)),
]
BREAKS = [
    slots_go_back_when_the_sweep_is_submitted,
    all_segments_share_their_staging,
    gradients_are_gathered_into_one_buffer,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_it_is_seen(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected(SCENARIOS["every step"])
    break_it(monkeypatch)
    assert not all(is_right(policy, right) for policy in POLICIES)


def is_right(policy: Policy, right: list[list[torch.Tensor]]) -> bool:
    try:
        return same(simulated(SCENARIOS["every step"], policy).seen, right)
    except (IndexError, KeyError, RuntimeError):
        return False
