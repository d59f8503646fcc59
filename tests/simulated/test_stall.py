"""Stalls and step times in virtual seconds: exact, the same in every step, the same under every policy."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.testing.simulated import Policy, Rates, SimulatedMachine, SimulatedTraining

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 8
SHAPE = (16, 16)
NUMEL = 256
COPY_BYTES = 1024
NUM_STEPS = 16
SETTLED = 6  # steps after which the pipeline is full


def train(
    machine: SimulatedMachine | Rates,
    policy: Policy | None = None,
    *,
    num_layers: int = NUM_LAYERS,
    num_steps: int = NUM_STEPS,
    **config: Any,
) -> SimulatedTraining:
    """Steps of a model of equal layers; every channel is deferred unless ``config`` says else, and
    without previews, so that nothing crosses the link but gradients and weights."""
    if isinstance(machine, Rates):
        machine = SimulatedMachine(policy, machine)
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in range(num_layers)]
    settings = ZenFlowConfig(**{"topk_ratio": 0, "preview": False, **config})
    training = SimulatedTraining(machine, [{"params": params}], settings)
    for _ in range(num_steps):
        training.step(random_gradients(num_layers))
    return training


def random_gradients(num_layers: int) -> list[Tensor]:
    return [torch.randn(SHAPE) for _ in range(num_layers)]


def per_layer(
    *, compute_s: float, to_host_s: float = 0.0, sweep_s: float = 0.0, to_device_s: float = 0.0
) -> Rates:
    """Rates at which one layer's copy, sweep of one slot and copy back take so many seconds."""
    return Rates(
        forward_s=compute_s / 4,
        backward_s=compute_s * 3 / 4,
        to_host_bytes_per_s=COPY_BYTES / to_host_s if to_host_s else float("inf"),
        to_device_bytes_per_s=COPY_BYTES / to_device_s if to_device_s else float("inf"),
        slot_s_per_element=sweep_s / NUMEL,
    )


def assert_steady(
    training: SimulatedTraining, *, stall_s: float, compute_s: float, settled: int = SETTLED
) -> None:
    """Behind step ``settled`` every step stalls for ``stall_s``, and nothing else takes time."""
    for step, (stats, period_s) in enumerate(
        zip(training.stats, training.periods_s, strict=True), 1
    ):
        if step > settled:
            assert stats.stall_s == pytest.approx(stall_s, abs=1e-9), step
            assert period_s == pytest.approx(compute_s + stall_s, abs=1e-9), step
            assert stats.step_overhead_s == pytest.approx(0.0, abs=1e-9), step


# What bounds the pipeline of 8 layers, and how long it is from the end of one step to the end of its
# publish: the slowest stage 8 times, the others once.
BOUND = {
    "link to the host": ({"to_host_s": 3.0, "sweep_s": 1.0, "to_device_s": 2.0}, 27.0),
    "host": ({"to_host_s": 1.0, "sweep_s": 3.0, "to_device_s": 2.0}, 27.0),
    "link to the device": ({"to_host_s": 1.0, "sweep_s": 2.0, "to_device_s": 3.0}, 27.0),
    "all the same": ({"to_host_s": 2.0, "sweep_s": 2.0, "to_device_s": 2.0}, 20.0),
}


POLICIES = {
    "late": Policy(),
    "early": Policy(compute="early", links="early", workers="early"),
    "loose": Policy(links="loose", workers="loose"),
    "random": Policy(compute="random", links="random"),
}


@pytest.mark.covers("overlap that can be seen")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("spare_s", [5.0, 0.0, -0.5, -12.0])
def test_a_step_stalls_for_exactly_what_compute_does_not_cover(policy, bound, spare_s):
    seconds, length_s = BOUND[bound]
    compute_s = length_s + spare_s
    training = train(
        per_layer(compute_s=compute_s, **seconds), POLICIES[policy], num_steps=9, update_interval=1
    )
    assert_steady(training, stall_s=max(0.0, -spare_s), compute_s=compute_s)


@pytest.mark.parametrize("bound", BOUND)
def test_synchronous_steps_stall_for_everything(bound):
    seconds, length_s = BOUND[bound]
    rates = per_layer(compute_s=100.0, **seconds)
    training = train(rates, update_interval=1, overlap_step=False)
    assert_steady(training, stall_s=length_s, compute_s=100.0)


@pytest.mark.parametrize("workers", ["early", "late"])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_workers_share_the_work(workers, num_workers):
    rates = per_layer(compute_s=4.0, sweep_s=3.0)
    machine = SimulatedMachine(Policy(workers=workers), rates, num_workers=num_workers)
    training = train(machine, update_interval=1)
    length_s = 3.0 * NUM_LAYERS / num_workers
    assert_steady(training, stall_s=max(0.0, length_s - 4.0), compute_s=4.0)


@pytest.mark.parametrize("workers", ["early", "late"])
@pytest.mark.parametrize("compute_s", [30.0, 24.0, 20.0])
def test_where_memory_is_shared_only_the_host_takes_time(workers, compute_s):
    rates = per_layer(compute_s=compute_s, to_host_s=7.0, sweep_s=3.0, to_device_s=7.0)
    machine = SimulatedMachine(Policy(workers=workers), rates, shared=True)
    training = train(machine, update_interval=1)
    assert_steady(training, stall_s=max(0.0, 24.0 - compute_s), compute_s=compute_s)


@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("compute_s", [13.0, 4.0])
def test_every_step_costs_the_same(interval, compute_s):
    """An equal share of the layers is swept in each step, whether it is covered or not."""
    sweep_s, slot_s = 0.5, 0.5
    rates = replace(
        per_layer(compute_s=compute_s, sweep_s=slot_s), sweep_s_per_element=sweep_s / NUMEL
    )
    training = train(rates, update_interval=interval)
    num_swept = NUM_LAYERS // interval
    busy_s = num_swept * (sweep_s + interval * slot_s)
    assert_steady(training, stall_s=max(0.0, busy_s - compute_s), compute_s=compute_s)
    for stats in training.stats[SETTLED:]:
        assert stats.host_busy_s == pytest.approx(busy_s)
        assert stats.h2d_bytes == num_swept * COPY_BYTES
        assert stats.d2h_bytes == NUM_LAYERS * COPY_BYTES
        assert stats.traffic_model_sizes == pytest.approx(1 + 1 / interval)
        assert stats.staleness_steps == interval


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_every_step_costs_the_same_when_the_link_to_the_host_is_too_slow(interval):
    """No more can be had than the link carries, and each step waits for its share of that, because
    what is swept next crosses first."""
    training = train(
        per_layer(compute_s=20.0, to_host_s=3.0), num_steps=32, update_interval=interval
    )
    assert_steady(training, stall_s=4.0, compute_s=20.0, settled=20)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_link_carries_what_the_figures_say(interval):
    machine = SimulatedMachine(Policy(workers="early"), per_layer(compute_s=1.0))
    training = train(machine, update_interval=interval)
    lanes = (machine.simulation.to_host, machine.simulation.to_device)
    before = [lane.num_bytes for lane in lanes]
    stats = training.step(random_gradients(NUM_LAYERS))
    moved = [lane.num_bytes - b for lane, b in zip(lanes, before, strict=True)]
    assert moved == [stats.d2h_bytes, stats.h2d_bytes]


def test_device_memory_stays_the_same_once_the_pipeline_is_full():
    machine = SimulatedMachine(rates=per_layer(compute_s=1.0, to_host_s=1.0, sweep_s=1.0))
    training = train(machine, update_interval=4)
    before = machine.memory.allocated_bytes
    for _ in range(NUM_STEPS):
        training.step(random_gradients(NUM_LAYERS))
    assert machine.memory.allocated_bytes == before


def test_every_wait_for_the_link_counts_as_stall():
    rates = per_layer(compute_s=40.0, to_host_s=3.0, to_device_s=3.0)
    training = train(rates, update_interval=1, topk_ratio=0.25, select_interval=8)
    assert sum(stats.reselected_channels for stats in training.stats) > 0
    for stats in training.stats[1:]:
        assert stats.step_overhead_s == pytest.approx(0.0, abs=1e-9), stats.step
