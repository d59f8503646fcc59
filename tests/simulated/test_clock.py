"""The simulator itself: virtual times follow from rates and from who waits for what."""

import pytest
import torch
from parts import NUM_BYTES, SIZE, Machine

from zenflow.backends.ticket import FINISHED, Transfer


@pytest.mark.parametrize("compute", ["early", "late", "random"])
@pytest.mark.parametrize("links", ["early", "late", "random"])
def test_times_follow_from_rates_whatever_the_policy(compute, links):
    machine = Machine(compute, links)
    simulation = machine.simulation
    simulation.compute.enqueue(lambda: None, duration_s=5.0)
    source = machine.tensor(1.0)
    down = machine.to_host(source)  # waits for compute: 5 to 6
    queued = machine.to_host(source)  # behind it: 6 to 7
    up = machine.link.to_device(torch.ones(SIZE), source, FINISHED)  # beside it: 0 to 2
    simulation.compute.enqueue(lambda: None, duration_s=3.0)  # 5 to 8
    assert simulation.now_s == 0.0
    up.wait()
    assert simulation.now_s == 2.0
    down.wait()
    assert simulation.now_s == 6.0
    assert not queued.done()
    simulation.spend(1.0)
    assert queued.done()
    assert simulation.now_s == 7.0
    machine.device.mark().wait()
    assert simulation.now_s == 8.0
    assert (simulation.to_host.busy_s, simulation.to_host.num_bytes) == (2.0, 2 * NUM_BYTES)


def test_waiting_for_what_is_past_takes_no_time():
    machine = Machine()
    transfer = machine.to_host(machine.tensor(1.0))
    machine.simulation.spend(10.0)
    transfer.wait()
    assert machine.simulation.now_s == 10.0


def test_a_job_runs_in_its_workers_time():
    machine = Machine()
    simulation = machine.simulation
    transfer = machine.to_host(machine.tensor(1.0))

    def job() -> float:
        transfer.wait()
        simulation.spend(2.0)
        return simulation.clock()

    (task,) = machine.workers.submit([job])
    assert not task.done()
    assert simulation.now_s == 0.0
    task.wait()
    assert task.result == simulation.now_s == 3.0


def test_a_worker_takes_one_job_after_the_other():
    machine = Machine()
    ends = machine.workers.submit([lambda: machine.simulation.spend(1.0)] * 3)
    ends[1].wait()
    assert machine.simulation.now_s == 2.0
    assert not ends[2].effective
    machine.workers.close()
    assert (ends[2].start_s, ends[2].finish_s) == (2.0, 3.0)


def test_jobs_go_to_the_worker_that_is_free_first():
    machine = Machine(num_workers=2)
    seconds = [4.0, 1.0, 1.0]
    tasks = machine.workers.submit([lambda s=s: machine.simulation.spend(s) for s in seconds])
    tasks[2].wait()
    assert [(task.start_s, task.finish_s) for task in tasks] == [(0, 4), (0, 1), (1, 2)]
    assert machine.simulation.now_s == 2.0


def test_copies_of_several_workers_cross_in_the_order_of_time():
    machine = Machine(num_workers=2)
    simulation, target = machine.simulation, machine.tensor()

    def job(seconds: float) -> Transfer:
        simulation.spend(seconds)
        return machine.link.to_device(torch.ones(SIZE), target, FINISHED)

    slow, quick = machine.workers.submit([lambda: job(4.0), lambda: job(1.0)])
    quick.take_effect()
    slow.wait()
    slow.result.wait()
    assert simulation.now_s == 6.0
    assert quick.result.ticket.finish_s == 3.0


def test_a_jobs_error_is_raised_by_its_wait_alone():
    machine = Machine()

    def fail() -> None:
        raise KeyError("no")

    failed, fine = machine.workers.submit([fail, lambda: 1])
    fine.wait()
    assert fine.result == 1
    with pytest.raises(KeyError):
        failed.wait()
