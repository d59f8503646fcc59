"""Host workers, the kernel they run, and host memory, in virtual time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.host_kernel import HostState, TorchKernel
from zenflow.backends.storage import RamStorage
from zenflow.core.rules import Coefficients
from zenflow.testing.simulated.clock import Actor, Simulation
from zenflow.testing.simulated.memory import poison_
from zenflow.testing.simulated.policy import Effects
from zenflow.testing.simulated.queue import Pending, Queue


class SimulatedTask(Pending):
    """A job given to the workers. Its times are known once it has run."""

    result: Any

    def __init__(self, workers: "SimulatedWorkers", job: Callable[[], Any]) -> None:
        super().__init__(workers)
        self._workers = workers
        self._job: Callable[[], Any] | None = job
        self._submitted_s = workers.simulation.now_s
        self._error: BaseException | None = None
        self.start_s = self.finish_s = 0.0

    def done(self) -> bool:
        return self.effective and self.finish_s <= self._workers.simulation.now_s

    def wait(self) -> None:
        self._workers.simulation.stir()
        self.take_effect()
        self._workers.simulation.current.advance_to(self.finish_s)
        if self._error is not None:
            raise self._error

    def act(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        worker = min(self._workers.actors, key=lambda actor: actor.now_s)
        worker.advance_to(self._submitted_s)
        self.start_s = worker.now_s
        with self._workers.simulation.acting(worker):
            try:
                self.result = job()
            except BaseException as error:
                self._error = error
        self.finish_s = worker.now_s


class SimulatedWorkers(Queue):
    """Host workers behind one queue: a job goes to the worker that is free first.

    Its code runs in that worker's time: what it waits for and what it spends do not pass for the
    training thread.
    """

    def __init__(self, simulation: Simulation, num_threads: int, effects: Effects) -> None:
        super().__init__(simulation, effects)
        self.num_threads = num_threads
        self.actors = [Actor(f"worker {i}") for i in range(num_threads)]

    def submit(self, jobs: Sequence[Callable[[], Any]]) -> list[SimulatedTask]:
        """See ``HostWorkers.submit``; here each job goes to the worker that is free first."""
        tasks = [SimulatedTask(self, job) for job in jobs]
        for task in tasks:
            self.issue(task)
        return tasks

    def check(self) -> None:
        return None

    def close(self) -> None:
        self.drain()
        for actor in self.actors:
            self.simulation.current.advance_to(actor.now_s)


class SimulatedKernel:
    """The torch kernel, at a price for each element of a sweep and one for each of its gradients.

    Args:
        sweep_s_per_element: state in and out, weights out.
        slot_s_per_element: one gradient.
    """

    name = "simulated"

    def __init__(
        self, simulation: Simulation, sweep_s_per_element: float, slot_s_per_element: float
    ) -> None:
        self._simulation = simulation
        self.sweep_s_per_element = sweep_s_per_element
        self.slot_s_per_element = slot_s_per_element
        self._torch = TorchKernel()

    def sweep(
        self,
        state: HostState,
        grads: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
        *,
        mean: bool,
        delay: float,
        out: Tensor,
    ) -> None:
        self._torch.sweep(state, grads, coefficients, mean=mean, delay=delay, out=out)
        self._spend(out.numel(), len(grads))

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        self._torch.write(state, last, delay, out)
        self._spend(out.numel(), 0)

    def _spend(self, numel: int, num_slots: int) -> None:
        per_element_s = self.sweep_s_per_element + num_slots * self.slot_s_per_element
        self._simulation.spend(numel * per_element_s)


class PoisonedStorage(RamStorage):
    """Host memory that holds poison until somebody writes it."""

    def __init__(self) -> None:
        super().__init__(pin=False)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = super().buffer(shape, dtype)
        poison_(tensor)
        return tensor
