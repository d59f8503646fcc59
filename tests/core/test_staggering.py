"""The schedule in motion: the promised staleness is reached, kept, and depends on each rule."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core import schedule
from zenflow.core.segments import plan_segments

IsDue = Callable[[int, int, int, int, int], bool]


def lags(
    trace: Sequence[int],
    middle: float,
    bound: int,
    *,
    overlap: bool,
    is_due: IsDue = schedule.is_due,
) -> list[int]:
    """After each step, how many steps one segment's visible weights lag behind AdamW.

    Args:
        trace: each step's update interval.
        middle: where the segment lies in the table, 0 to 1.
    """
    waiting: list[int] = []
    result = []
    for t, interval in enumerate(trace, 1):
        waiting.append(t)
        unpublished: list[int] = []
        if is_due(t, int(middle * interval), interval, waiting[0], bound):
            waiting, unpublished = [], waiting
        missing = (unpublished if overlap else []) + waiting
        result.append(t - missing[0] + 1 if missing else 0)
    return result


intervals = st.integers(1, 9)
middles = st.floats(0, 1, exclude_max=True)


@given(intervals, middles, st.booleans())
def test_lookahead_is_the_mean_staleness_and_the_bound_its_largest(
    interval: int, middle: float, overlap: bool
) -> None:
    windows = lags([interval] * 5 * interval, middle, interval, overlap=overlap)[2 * interval :]
    assert sum(windows) / len(windows) == schedule.lookahead_steps(interval, overlap)
    assert max(windows) == schedule.max_staleness(interval, overlap)


@given(st.integers(1, 8), st.data(), middles, st.booleans())
def test_any_trace_within_the_bound_keeps_it(
    bound: int, data: st.DataObject, middle: float, overlap: bool
) -> None:
    trace = data.draw(st.lists(st.integers(1, bound), min_size=1, max_size=60))
    assert max(lags(trace, middle, bound, overlap=overlap)) <= schedule.max_staleness(
        bound, overlap
    )


def without_the_age_rule(t: int, phase: int, interval: int, oldest: int, bound: int) -> bool:
    return t % interval == phase


def one_step_late(t: int, phase: int, interval: int, oldest: int, bound: int) -> bool:
    return schedule.is_due(t, phase, interval, oldest, bound + 1)


@pytest.mark.parametrize("broken", [without_the_age_rule, one_step_late])
def test_the_bound_rests_on_the_age_rule(broken: IsDue) -> None:
    """An interval that grows just before a segment is swept postpones it again and again."""
    traces = ([2, 3, 4, 3] * 8, [4, 3] * 16, [3, 3, 2, 4, 3, 2, 3, 4, 3, 4] * 3)
    cases = [(trace, middle / 20) for trace in traces for middle in range(20)]
    assert max(max(lags(t, m, 4, overlap=True)) for t, m in cases) == 4
    assert max(max(lags(t, m, 4, overlap=True, is_due=broken)) for t, m in cases) > 4


def test_a_transformer_is_swept_in_equal_shares() -> None:
    """1.1 billion parameters: no step sweeps 2% of the model more than another."""
    layer = [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048)]
    layer += [(5632, 2048), (5632, 2048), (2048, 5632)]
    blocks = plan_segments([(32000, 2048), *layer * 22, (32000, 2048)])
    numels = [block.numel for block in blocks]
    for interval in (2, 3, 4, 8):
        shares = [0] * interval
        for numel, phase in zip(numels, schedule.phases(numels, interval), strict=True):
            shares[phase] += numel
        assert max(shares) - min(shares) <= 0.02 * sum(numels)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), intervals)
def test_phases_follow_the_table(numels: list[int], interval: int) -> None:
    phases = schedule.phases(numels, interval)
    assert phases == sorted(phases)
