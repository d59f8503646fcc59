"""Host workers: threads that run sweeps, and the task through which one is waited for."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

_log = logging.getLogger("zenflow")

_LIVENESS_CHECK_S = 0.5
_REPORT_EVERY_S = 30.0
_JOIN_S = 2.0
"""A worker that hangs in its job is a daemon and does not hold up the end of the process."""


class WorkerDied(RuntimeError):
    """A worker thread ended without finishing its task."""


class Task(Protocol):
    """A job given to the workers: a ticket with a result."""

    result: Any

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class HostWorkers(Protocol):
    """Three methods: hand over jobs, see what went wrong, end."""

    num_threads: int

    def submit(self, jobs: Sequence[Callable[[], Any]]) -> Sequence[Task]:
        """Let one worker run ``jobs``, one after the other, after all jobs submitted before them have
        started. A wait for one may last until all are done, so together they should be short."""
        ...

    def check(self) -> None:
        """Raise if a worker has died."""
        ...

    def close(self) -> None:
        """Let the running jobs finish and end the workers. Idempotent."""
        ...


class ThreadTask(Generic[T]):
    """A job's outcome, set by the worker that ran it.

    Args:
        finished: set once the worker is done with all that was submitted together.
    """

    result: T

    def __init__(
        self, job: Callable[[], T], workers: "ThreadWorkers", finished: threading.Event
    ) -> None:
        self._job: Callable[[], T] | None = job
        self._workers = workers
        self._finished = finished
        self._error: BaseException | None = None
        self._failed = ""

    @property
    def description(self) -> str:
        """The job in words, formed when somebody asks."""
        job = self._job
        return self._failed or ("a job that has ended" if job is None else repr(job))

    def run(self) -> None:
        """Run the job, in a worker."""
        job = self._job
        assert job is not None
        try:
            self.result = job()
        except BaseException as error:
            self._failed = repr(job)
            self._error = error
        finally:
            self._job = None
            del job

    def done(self) -> bool:
        return self._job is None

    def wait(self) -> None:
        begin_s = reported_s = time.monotonic()
        while self._job is not None and not self._finished.wait(_LIVENESS_CHECK_S):
            self._workers.check()
            if time.monotonic() - reported_s >= _REPORT_EVERY_S:
                reported_s = time.monotonic()
                _log.warning(
                    "waiting for %.0f s for %r; workers: %s",
                    reported_s - begin_s,
                    self.description,
                    self._workers.describe(),
                )
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # an exit or an interrupt of the worker is not the caller's
            raise WorkerDied(f"{self.description} was ended by {self._error!r}") from self._error


class _Batch(NamedTuple):
    """What one worker runs in one go."""

    tasks: list[ThreadTask[Any]]
    finished: threading.Event


class ThreadWorkers:
    """Daemon threads behind one queue. They hold nothing but the job they run.

    Args:
        num_threads: at least 1.
        begin: called first in each thread; an accelerator's current device belongs to the thread.
    """

    def __init__(self, num_threads: int, begin: Callable[[], None] | None = None) -> None:
        self.num_threads = num_threads
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._closed = False
        self._running: dict[str, tuple[ThreadTask[Any], float]] = {}
        self._threads = [
            threading.Thread(
                target=_work,
                args=(self._queue, self._running, begin),
                name=f"zenflow-worker-{i}",
                daemon=True,
            )
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Callable[[], T]]) -> list[ThreadTask[T]]:
        finished = threading.Event()
        tasks = [ThreadTask(job, self, finished) for job in jobs]
        self._queue.put(_Batch(tasks.copy(), finished))
        return tasks

    def check(self) -> None:
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead and not self._closed:
            raise WorkerDied(f"host worker threads have ended: {', '.join(dead)}")

    def describe(self) -> str:
        """What each worker is doing, for a report of a hang."""
        return ", ".join(f"{thread.name} {self._does(thread.name)}" for thread in self._threads)

    def _does(self, name: str) -> str:
        running = self._running.get(name)
        if running is None:
            return "is idle"
        task, since = running
        return f"runs {task.description} since {time.strftime('%H:%M:%S', time.localtime(since))}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)


_this_thread = threading.local()


def in_worker() -> bool:
    """Whether the calling thread is a host worker, of any optimizer."""
    return getattr(_this_thread, "is_worker", False)


def _work(
    queue: "SimpleQueue[_Batch | None]",
    running: dict[str, tuple[ThreadTask[Any], float]],
    begin: Callable[[], None] | None,
) -> None:
    _this_thread.is_worker = True
    name = threading.current_thread().name
    if begin is not None:
        begin()
    while (batch := queue.get()) is not None:
        batch.tasks.reverse()
        while batch.tasks:
            task = batch.tasks.pop()
            running[name] = task, time.time()
            task.run()
            del task
            del running[name]
        batch.finished.set()
        del batch
