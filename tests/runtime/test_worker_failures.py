"""A sweep that fails or a worker that dies, wherever the training thread happens to be."""

import functools
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zenflow
from zenflow.runtime.pipeline import HostWorkError
from zenflow.runtime.sweep import SweepJob
from zenflow.runtime.workers import ThreadWorkers, WorkerDied

pytestmark = pytest.mark.usefixtures("one_thread")


def train(config: dict[str, Any], num_steps: int = 3) -> tuple[nn.Module, zenflow.ZenFlowAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"topk_ratio": 0.1} | config)
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: zenflow.ZenFlowAdamW) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()


class Broken(Exception):
    """What a test raises in a worker."""


def break_sweeps(
    monkeypatch: pytest.MonkeyPatch, optimizer: zenflow.ZenFlowAdamW, error: BaseException
) -> None:
    """From now on. None that was queued before may run after it, so drain first."""
    optimizer.synchronize()

    def fail(job: SweepJob) -> None:
        raise error

    monkeypatch.setattr(SweepJob, "__call__", fail)


ACTS: dict[str, Callable[[nn.Module, zenflow.ZenFlowAdamW], Any]] = {
    "step": step,
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "every step": {"update_interval": 1},
    "a window": {"update_interval": 4},
    "accumulate": {"update_interval": 2, "update_rule": "accumulate"},
    "three workers": {"update_interval": 1, "host_threads": 3},
}


@pytest.mark.covers("failed workers")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("act", ACTS)
def test_the_next_call_raises_with_the_cause(
    act: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = train(CONFIGS[config])
    error = Broken("the disk is full")
    break_sweeps(monkeypatch, optimizer, error)
    for _ in range(4):
        step(model, optimizer)
        if any(s.sweep is not None for s in optimizer._running_engine().pipeline.segments):
            break
    else:
        pytest.fail("no sweep was started")
    with pytest.raises(HostWorkError, match="the disk is full") as raised:
        ACTS[act](model, optimizer)
    assert raised.value.__cause__ is error
    with pytest.raises(HostWorkError, match="restart from the last checkpoint") as raised:
        step(model, optimizer)
    assert raised.value.__cause__ is error
    optimizer.close()


@pytest.mark.parametrize("error", [Broken("synchronous"), MemoryError()])
def test_without_overlap_the_same_step_raises(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = train({"overlap_step": False, "update_interval": 1})
    break_sweeps(monkeypatch, optimizer, error)
    for _ in range(2):
        with pytest.raises(HostWorkError) as raised:
            step(model, optimizer)
    optimizer.close()
    causes: list[BaseException] = [raised.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert causes[-1] is error


def test_closing_after_a_failure_ends_the_threads_and_says_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = train({"update_interval": 1})
    break_sweeps(monkeypatch, optimizer, Broken("gone"))
    step(model, optimizer)
    threads = list(optimizer._running_engine().platform.workers._threads)
    with caplog.at_level(logging.WARNING, "zenflow"):
        optimizer.close()
        optimizer.close()
    assert not any(thread.is_alive() for thread in threads)
    assert "closed without the pending deferred updates" in caplog.text
    assert "gone" in caplog.text


@pytest.mark.covers("failed workers")
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_dead_thread_is_enough(num_workers: int, overlap: bool) -> None:
    model, optimizer = train({"host_threads": num_workers, "overlap_step": overlap})
    optimizer.synchronize()
    optimizer._running_engine().platform.workers._queue.put(None)
    begin_s = time.monotonic()
    with pytest.raises(HostWorkError, match="host worker threads have ended") as raised:
        for _ in range(200):
            step(model, optimizer)
            time.sleep(0.01)
    assert isinstance(raised.value.__cause__, WorkerDied)
    assert time.monotonic() - begin_s < 5
    optimizer.close()


def test_a_thread_that_dies_with_its_task_is_noticed_by_who_waits() -> None:
    """The task is never finished; waiting looks for the living twice a second."""
    workers = ThreadWorkers(1)
    entered, leave = threading.Event(), threading.Event()

    def die() -> None:
        entered.set()
        leave.wait()

    (task,) = workers.submit([die])
    task._finished = _Never()
    entered.wait()
    workers._queue.put(None)
    leave.set()
    begin_s = time.monotonic()
    with pytest.raises(WorkerDied, match="zenflow-worker-0"):
        task.wait()
    assert time.monotonic() - begin_s < 3
    workers.close()


class _Never(threading.Event):
    """What a thread that is killed in its task leaves behind."""

    def set(self) -> None:
        return None


@pytest.mark.covers("slow is not dead")
def test_slow_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of several liveness checks ends as any other."""
    monkeypatch.setattr("zenflow.runtime.workers._LIVENESS_CHECK_S", 0.02)
    model, optimizer = train({"update_interval": 1})
    run = SweepJob.__call__

    def slowly(job: SweepJob) -> Any:
        time.sleep(0.15)
        return run(job)

    monkeypatch.setattr(SweepJob, "__call__", slowly)
    step(model, optimizer)
    step(model, optimizer)
    assert optimizer.stats.stall_s > 0.1
    assert optimizer.stats.step == 5
    optimizer.close()


@pytest.mark.parametrize("together", [1, 7])
def test_jobs_of_several_threads_all_end_and_keep_their_results(together: int) -> None:
    workers = ThreadWorkers(3)
    jobs = [lambda i=i: i * i for i in range(210)]
    tasks = [
        task
        for first in range(0, len(jobs), together)
        for task in workers.submit(jobs[first : first + together])
    ]
    for number, task in enumerate(tasks):
        task.wait()
        assert task.done()
        assert task.result == number * number
    workers.check()
    workers.close()
    workers.close()
    workers.check()


def test_jobs_given_together_run_in_order_in_one_worker_and_fail_alone() -> None:
    workers = ThreadWorkers(3)
    ran: list[tuple[int, str]] = []

    def job(number: int) -> None:
        ran.append((number, threading.current_thread().name))
        if number == 1:
            raise KeyError("no")

    first, failed, last = workers.submit([functools.partial(job, number) for number in range(3)])
    last.wait()
    first.wait()
    with pytest.raises(KeyError):
        failed.wait()
    assert [number for number, _ in ran] == [0, 1, 2]
    assert len({name for _, name in ran}) == 1
    workers.close()


def test_small_sweeps_are_handed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of many small weights, handing over costs more than sweeping."""
    handed_over: list[int] = []
    submit = ThreadWorkers.submit

    def count(workers: ThreadWorkers, jobs: Any) -> Any:
        if isinstance(jobs[0], SweepJob):
            handed_over.append(sum(job.out.numel() for job in jobs))
        return submit(workers, jobs)

    monkeypatch.setattr(ThreadWorkers, "submit", count)
    shapes = [(16, 16)] * 40 + [(512, 512)] * 2
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    config = {"update_interval": 1, "topk_ratio": 0.0}
    optimizer = zenflow.ZenFlowAdamW(params, lr=1e-3, config=config)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert handed_over == [40 * 256 + 512 * 512, 512 * 512]
    optimizer.close()


def test_an_optimizer_that_is_collected_in_its_own_worker_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector runs in whichever thread allocates; the job there cannot wait for itself."""
    others = set(threading.enumerate())
    model, optimizer = train({"update_interval": 1, "host_threads": 1})
    optimizer.synchronize()
    optimizer.itself = optimizer  # a cycle, as learning rate schedulers make them
    dropped, collected = threading.Event(), threading.Event()
    call = SweepJob.__call__

    def collect(job: SweepJob) -> Any:
        assert dropped.wait(10)
        gc.collect()
        collected.set()
        return call(job)

    gc.collect()
    gc.disable()
    try:
        monkeypatch.setattr(SweepJob, "__call__", collect)
        step(model, optimizer)
        before = [param.detach().clone() for param in model.parameters()]
        started = set(threading.enumerate()) - others
        workers = [t for t in started if t.name.startswith("zenflow-worker")]
        assert workers
        del optimizer
        dropped.set()
        assert collected.wait(10)
    finally:
        gc.enable()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert any(changed)  # the pending step was published


def test_each_worker_begins_with_what_it_was_told() -> None:
    began = []
    workers = ThreadWorkers(2, lambda: began.append(threading.current_thread().name))
    tasks = [workers.submit([lambda: None])[0] for _ in range(4)]
    for task in tasks:
        task.wait()
    workers.close()
    assert sorted(began) == ["zenflow-worker-0", "zenflow-worker-1"]
