"""The simulator itself: effects come when the policy says, and what was not waited for is poison."""

import pytest
import torch
from parts import SIZE, Machine, is_all, is_poison
from torch import Tensor

from zenflow.backends.ticket import FINISHED, Transfer
from zenflow.testing.simulated import Effects, Policy, Simulation
from zenflow.testing.simulated.device import SimulatedDevice
from zenflow.testing.simulated.memory import DeviceMemory


@pytest.mark.parametrize(("compute", "seen"), [("early", True), ("late", False)])
def test_device_work_takes_effect_when_the_policy_says(compute, seen):
    machine = Machine(compute=compute)
    tensor = machine.tensor(1.0)
    assert is_all(tensor, 1.0) == seen
    assert is_poison(tensor) != seen
    machine.device.mark().wait()
    assert is_all(tensor, 1.0)


def test_reading_waits_for_all_work_and_returns_a_copy():
    machine = Machine()
    tensor = machine.tensor(1.0)
    copy = machine.device.read(tensor)
    machine.device.run(Tensor.fill_, tensor, 2.0)
    machine.device.mark().wait()
    assert is_all(copy, 1.0)
    assert is_all(tensor, 2.0)


def test_waiting_for_a_mark_leaves_later_work_alone():
    machine = Machine()
    tensor = machine.tensor(1.0)
    mark = machine.device.mark()
    machine.device.run(Tensor.fill_, tensor, 2.0)
    mark.wait()
    assert is_all(tensor, 1.0)


@pytest.mark.parametrize("compute", ["early", "late"])
@pytest.mark.parametrize("links", ["early", "late"])
def test_a_copy_that_waits_for_its_source_copies_it(compute, links):
    machine = Machine(compute, links)
    transfer = machine.to_host(machine.tensor(1.0))
    assert is_all(transfer.wait(), 1.0)


@pytest.mark.parametrize(("compute", "links"), [("late", "early")])
def test_a_copy_without_its_after_copies_poison(compute, links):
    machine = Machine(compute, links)
    transfer = machine.link.to_host(machine.tensor(1.0), torch.zeros(SIZE), FINISHED)
    assert is_poison(transfer.wait())


def test_a_late_copy_without_its_after_poisons_what_is_still_read():
    machine = Machine()
    staging, weight = machine.tensor(1.0), machine.tensor()
    machine.device.mark().wait()
    machine.device.run(Tensor.copy_, weight, staging)
    machine.link.to_device(torch.ones(SIZE), staging, FINISHED)
    assert is_poison(machine.device.read(weight))


def test_a_late_copy_with_its_after_lets_earlier_readers_finish():
    machine = Machine()
    staging, weight = machine.tensor(1.0), machine.tensor()
    machine.device.run(Tensor.copy_, weight, staging)
    transfer = machine.link.to_device(torch.zeros(SIZE), staging, machine.device.mark())
    assert is_all(machine.device.read(weight), 1.0)
    assert is_poison(staging)
    assert is_all(transfer.wait(), 0.0)


def test_a_copy_that_nobody_waits_for_leaves_poison():
    machine = Machine(compute="early")
    transfer = machine.to_host(machine.tensor(1.0))
    assert is_poison(transfer.tensor)
    transfer.wait()
    assert is_all(transfer.tensor, 1.0)


def test_a_copy_whose_source_was_dropped_copies_poison():
    machine = Machine(compute="early")
    ticket = machine.to_host(machine.tensor(1.0)).ticket
    kept = machine.to_host(machine.tensor(2.0))
    target = torch.zeros(SIZE)
    ticket = machine.link.to_host(machine.tensor(1.0), target, machine.device.mark()).ticket
    ticket.wait()
    assert is_poison(target)
    assert is_all(kept.wait(), 2.0)


def test_a_copy_reads_its_source_as_it_is_at_the_end():
    machine = Machine(compute="early")
    source = machine.tensor(1.0)
    transfer = machine.to_host(source)
    machine.device.run(Tensor.fill_, source, 2.0)
    assert is_all(transfer.wait(), 2.0), "written too early: a late copy has to show it"


def test_waiting_for_a_copy_lets_earlier_copies_take_effect():
    machine = Machine()
    first, second = machine.to_host(machine.tensor(1.0)), machine.to_host(machine.tensor(2.0))
    second.wait()
    assert is_all(first.tensor, 1.0)


def test_random_effects_come_between_issue_and_wait():
    found = set()
    for seed in range(20):
        simulation = Simulation(Policy(compute="random", seed=seed))
        memory = DeviceMemory()
        device = SimulatedDevice(simulation, memory)
        tensor = device.empty(SIZE, torch.float32)
        device.run(Tensor.fill_, tensor, 1.0)
        found.add(is_all(tensor, 1.0))
        assert is_all(device.read(tensor), 1.0)
    assert found == {True, False}


def test_arguments_are_found_however_deep():
    machine = Machine()
    tensors = [machine.tensor() for _ in range(3)]

    def fill(deep, number, nothing):
        deep[0].fill_(number)
        deep[1][0][0].fill_(number)
        deep[1][1].ticket.fill_(number)
        assert nothing is None

    deep = [tensors[0], ([tensors[1]], Transfer(tensors[2], tensors[2], tensors[2]))]
    machine.device.run(fill, deep, 3.0, None)
    machine.device.mark().wait()
    assert all(is_all(tensor, 3.0) for tensor in tensors)


def test_an_error_in_queued_work_reaches_who_waits():
    machine = Machine()
    index = machine.device.empty((2,), torch.int64)
    machine.device.run(torch.index_select, machine.tensor(1.0), 1, index)
    with pytest.raises((IndexError, RuntimeError)):
        machine.device.mark().wait()


@pytest.mark.parametrize(("links", "seen"), [("late", True), ("loose", False)])
def test_loose_copies_take_effect_for_their_own_waits_only(links: Effects, seen: bool) -> None:
    machine = Machine(links=links)
    first, second = machine.to_host(machine.tensor(1.0)), machine.to_host(machine.tensor(2.0))
    assert is_all(second.wait(), 2.0)
    assert is_all(first.tensor, 1.0) == seen
    assert is_all(first.wait(), 1.0)


def test_a_stream_is_never_loose() -> None:
    with pytest.raises(AssertionError, match="overtakes"):
        Simulation(Policy(compute="loose"))
