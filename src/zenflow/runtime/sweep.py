"""One sweep: the job that a worker runs and what the training thread keeps of it until its
publish."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zenflow.backends.host_kernel import HostKernel
from zenflow.backends.link import Link
from zenflow.backends.storage import Storage
from zenflow.backends.ticket import Ticket, Transfer
from zenflow.core.preview import write_factors
from zenflow.core.rules import SubStep
from zenflow.runtime.slots import Slot
from zenflow.runtime.stages import staged
from zenflow.runtime.workers import Task


@dataclass(slots=True, eq=False)
class Refresh:
    """New factors of a segment's previews, see :mod:`zenflow.core.preview`.

    Attributes:
        places, channels: of its deferred channels, as ``write_factors`` takes them.
        factors: the device's.
        room: host memory for them that can cross the link; None where memory is shared.
        transfer: the copy under way.
    """

    places: Tensor | None
    channels: Tensor
    factors: Tensor
    room: Tensor | None
    transfer: Transfer | None = None

    def write(self, exp_avg_sq: Tensor, last: SubStep) -> None:
        """Compute them of the second moment as it is after ``last``."""
        out = self.factors if self.room is None else self.room
        bias2 = 1 - last.beta2**last.step
        write_factors(exp_avg_sq, self.places, self.channels, bias2, last.eps, out)

    def send(self, link: Link, after: Ticket) -> None:
        if self.room is not None:
            self.transfer = link.to_device(self.room, self.factors, after)


@dataclass(slots=True, eq=False, repr=False)
class SweepJob:
    """What a worker needs, and nothing that leads back to the engine.

    Attributes:
        slots: to apply, oldest first; none to write the weights again.
        last: the sub-step that the sweep ends with.
        mean: one update with the slots' mean gradient.
        delay: steps of lookahead.
        out: host staging for the new weights.
        staging: device memory for them; None where memory is shared.
        after: when the device's memory may be written.
        refresh: of what previews need; None: not in this sweep.
    """

    key: int
    storage: Storage
    kernel: HostKernel
    link: Link
    clock: Callable[[], float]
    slots: Sequence[Slot]
    last: SubStep
    mean: bool
    delay: float
    out: Tensor
    staging: Tensor | None
    after: Ticket
    refresh: Refresh | None = None
    busy_s: float = 0.0
    finished_s: float = 0.0

    def __repr__(self) -> str:
        return f"the sweep of segment {self.key} ({len(self.slots)} slots)"

    @staged("zenflow.sweep")
    def __call__(self) -> Transfer:
        for slot in self.slots:
            slot.ticket.wait()
        begin_s = self.clock()
        state = self.storage.fetch(self.key)
        coefficients = [slot.substep.coefficients() for slot in self.slots[:-1]]
        last = self.last.coefficients()
        if self.slots:
            self.kernel.sweep(
                state,
                [slot.grad for slot in self.slots],
                [*coefficients, last],
                mean=self.mean,
                delay=self.delay,
                out=self.out,
            )
        else:
            self.kernel.write(state, last, self.delay, self.out)
        if self.refresh is not None:
            self.refresh.write(state.exp_avg_sq, self.last)
        self.storage.store(self.key, state)
        self.finished_s = self.clock()
        self.busy_s = self.finished_s - begin_s
        if self.refresh is not None:
            self.refresh.send(self.link, self.after)
        return self.link.to_device(self.out, self.staging, self.after)


@dataclass(slots=True, eq=False)
class Sweep:
    """A sweep in flight.

    Attributes:
        task: None until it is submitted.
    """

    job: SweepJob
    task: Task | None = None

    @property
    def slots(self) -> Sequence[Slot]:
        return self.job.slots

    def await_weights(self) -> Tensor:
        """The new weights, where a publish reads them.

        Raises:
            whatever the sweep raised.
        """
        assert self.task is not None
        self.task.wait()
        transfer: Transfer = self.task.result
        refresh = self.job.refresh
        if refresh is not None and refresh.transfer is not None:
            refresh.transfer.wait()
        return transfer.wait()
