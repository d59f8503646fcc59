"""``update_interval="auto"`` on the virtual clock."""

from dataclasses import replace

import pytest
from test_stall import NUM_LAYERS, NUMEL, per_layer, random_gradients, train

from zenflow.testing.simulated import Rates, SimulatedMachine

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_INTERVAL = 4
NUM_STEPS = 60
SETTLED = 24


def machine_rates(compute_s: float, sweep_s: float, **others: float) -> Rates:
    """Each layer's sweep takes ``sweep_s`` and a quarter of a second for each slot."""
    rates = per_layer(compute_s=compute_s, sweep_s=0.25, **others)
    return replace(rates, sweep_s_per_element=sweep_s / NUMEL)


def stalls(rates: Rates, interval: int) -> bool:
    training = train(rates, update_interval=interval, lookahead=False)
    return any(stats.stall_s > 1e-9 for stats in training.stats[-2 * interval :])


def smallest_without_stall(rates: Rates) -> int:
    covered = [s for s in range(1, MAX_INTERVAL + 1) if not stalls(rates, s)]
    return covered[0] if covered else MAX_INTERVAL


CASES = [
    ((30.0, 1.0), {}, 1),
    ((30.0, 4.0), {}, 2),
    ((16.0, 4.0), {}, 3),
    ((12.0, 4.0), {}, 4),
    ((6.0, 4.0), {}, 4),  # stalls whatever is chosen
    ((22.0, 1.0), {"to_host_s": 1.0}, 1),
    ((20.0, 0.0), {"to_host_s": 3.0}, 4),  # stalls whatever is chosen
]


@pytest.mark.parametrize(("seconds", "others", "chosen"), CASES)
def test_settles_at_the_smallest_interval_that_does_not_stall(seconds, others, chosen):
    rates = machine_rates(*seconds, **others)
    assert smallest_without_stall(rates) == chosen
    assert_settles(SimulatedMachine(rates=rates), chosen)


@pytest.mark.parametrize(("seconds", "others", "chosen"), CASES[:5])
def test_settles_where_memory_is_shared(seconds, others, chosen):
    assert_settles(SimulatedMachine(rates=machine_rates(*seconds), shared=True), chosen)


def assert_settles(machine: SimulatedMachine, chosen: int) -> None:
    training = train(
        machine, num_steps=NUM_STEPS, update_interval="auto", max_update_interval=MAX_INTERVAL
    )
    intervals = [stats.update_interval for stats in training.stats]
    assert set(intervals[SETTLED:]) == {chosen}
    assert intervals[:SETTLED] == sorted(intervals[:SETTLED])


def test_tries_ever_less_often_what_stalled_before():
    """A slow link to the device does not show in the host's time, only in the stall."""
    rates = machine_rates(20.0, 0.0, to_device_s=3.0)
    assert smallest_without_stall(rates) == 2
    training = train(rates, num_steps=200, update_interval="auto")
    intervals = [stats.update_interval for stats in training.stats]
    assert set(intervals) == {1, 2}
    assert intervals[100:].count(1) <= 8


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_never_goes_above_its_bound(bound):
    rates = machine_rates(6.0, 4.0)
    training = train(rates, num_steps=NUM_STEPS, update_interval="auto", max_update_interval=bound)
    assert {stats.update_interval for stats in training.stats} == set(range(1, bound + 1))
    assert all(stats.staleness_steps <= bound for stats in training.stats)


def test_follows_a_host_that_becomes_slower_and_faster_again():
    machine = SimulatedMachine(rates=machine_rates(30.0, 1.0))
    training = train(
        machine, num_steps=NUM_STEPS, update_interval="auto", max_update_interval=MAX_INTERVAL
    )
    seen = [training.optimizer.stats.update_interval]
    for sweep_s in (8.0, 1.0):
        machine.kernel.sweep_s_per_element = sweep_s / NUMEL
        for _ in range(NUM_STEPS):
            training.step(random_gradients(NUM_LAYERS))
        seen.append(training.optimizer.stats.update_interval)
    assert seen == [1, 3, 1]


CHANGES = [
    ((compute_s, sweep_s), (compute_s * compute, sweep_s * host))
    for compute_s, sweep_s in ((30.0, 1.0), (30.0, 4.0), (20.0, 2.0), (16.0, 4.0), (12.0, 4.0))
    for compute, host in ((2.0, 1.0), (0.5, 1.0), (1.0, 2.0), (1.0, 0.5))
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("shared", [False, True])
def test_follows_a_change_by_two_within_20_steps_and_then_rests(before, after, shared):
    machine = SimulatedMachine(rates=machine_rates(*before), shared=shared)
    training = train(
        machine, num_steps=NUM_STEPS, update_interval="auto", max_update_interval=MAX_INTERVAL
    )
    rates = machine.rates = machine_rates(*after)
    machine.kernel.sweep_s_per_element = rates.sweep_s_per_element
    machine.kernel.slot_s_per_element = rates.slot_s_per_element
    for _ in range(20 + NUM_STEPS):
        training.step(random_gradients(NUM_LAYERS))
    intervals = [stats.update_interval for stats in training.stats]
    rested = set(intervals[NUM_STEPS + 20 :])
    assert len(rested) == 1, "it swings"
    smallest = smallest_without_stall(rates)
    assert rested <= {smallest, min(smallest + 1, MAX_INTERVAL)}
    changing = intervals[NUM_STEPS : NUM_STEPS + 20]
    assert changing in (sorted(changing), sorted(changing, reverse=True))
    if not stalls(rates, MAX_INTERVAL):
        assert max(stats.stall_s for stats in training.stats[NUM_STEPS + 20 :]) < 1e-9


def test_is_one_where_nothing_is_hidden():
    training = train(
        machine_rates(1.0, 4.0), num_steps=12, update_interval="auto", overlap_step=False
    )
    assert {stats.update_interval for stats in training.stats} == {1}
