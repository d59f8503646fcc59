"""Zen-auto finds the smallest interval that fits, and stays there."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.auto import Sample, ZenAuto


def run(
    auto: ZenAuto, work_s: float, fixed_s: float, window_s: float, num_steps: int = 200
) -> list[int]:
    """A machine whose sweeps cost ``fixed_s`` and a share of ``work_s`` in each step."""
    seen = []
    for _ in range(num_steps):
        auto.observe(Sample(window_s, fixed_s + work_s / auto.interval))
        seen.append(auto.interval)
    return seen


times = st.floats(0.001, 1.0)


@given(times, st.floats(0, 0.1), times, st.integers(1, 8))
def test_settles_on_the_smallest_that_fits(
    work_s: float, fixed_s: float, window_s: float, bound: int
) -> None:
    seen = run(ZenAuto(bound), work_s, fixed_s, window_s)
    fits = [s for s in range(1, bound + 1) if fixed_s + work_s / s <= 0.95 * window_s]
    assert seen[-1] == (fits[0] if fits else bound)
    assert len(set(seen[100:])) == 1
    assert all(1 <= s <= bound for s in seen)


@given(times, times, times, st.integers(1, 8))
def test_goes_back_when_there_is_room_again(
    slow_s: float, work_s: float, window_s: float, bound: int
) -> None:
    auto = ZenAuto(bound)
    run(auto, slow_s + bound * window_s, 0.0, window_s)
    assert auto.interval == bound
    settled = run(auto, work_s, 0.0, window_s)[-1]
    fits = [s for s in range(1, bound + 1) if work_s / s <= 0.95 * window_s]
    # Shrinking keeps a margin, so that it does not swing.
    roomy = [s for s in range(1, bound + 1) if work_s / s < 0.7 * window_s]
    assert (fits or [bound])[0] <= settled <= (roomy or [bound])[0]


def test_a_single_slow_step_changes_nothing() -> None:
    auto = ZenAuto(4)
    for _ in range(10):
        auto.observe(Sample(1.0, 0.5))
    assert not auto.observe(Sample(1.0, 60.0))
    assert auto.interval == 1


def test_says_why() -> None:
    auto = ZenAuto(4)
    assert run(auto, 0.2, 0.0, 0.1, num_steps=4)[-1] == 2
    assert auto.reason == "host work of 200.0 ms at interval 1 against 100.0 ms beside compute"


@pytest.mark.parametrize(("interval", "bound", "expected"), [(3, 4, 3), (6, 4, 4)])
def test_goes_on_from_an_earlier_choice(interval: int, bound: int, expected: int) -> None:
    assert ZenAuto(bound, interval).interval == expected


@pytest.mark.parametrize("period", [6, 15, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_comes_and_goes_changes_it_ever_less_often(period: int, seed: int) -> None:
    """Other work takes the cores for a while, again and again: it does not follow for ever."""
    random = Random(seed)
    auto = ZenAuto(max_interval=4)
    changes, slowdown = [], 1.0
    for step in range(4000):
        if step % period == 0:
            slowdown = random.choice([0.5, 1.0, 2.0, 4.0])
        if auto.observe(Sample(window_s=1.0, host_s=0.9 * slowdown / auto.interval)):
            changes.append(step)
    assert auto.interval in (3, 4)
    assert sum(step >= 2000 for step in changes) <= 16
