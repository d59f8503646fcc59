"""Virtual time: threads, lanes of queued work, and when that work takes effect.

Two things that real hardware ties together are kept apart here. The *time* of an operation follows
from rates alone, so a stall is an exact number. Its *effect* on memory happens at any moment that a
:class:`Policy` likes between its issue and the first wait for it, so a wait that is missing shows
as a wrong number and not once in a thousand runs.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zenflow.backends.ticket import FINISHED, Ticket
from zenflow.testing.simulated.policy import Effects, Policy
from zenflow.testing.simulated.queue import Pending, Queue


class Actor:
    """A thread: it has come to a point in time, which its waits and its work move on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 0.0

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class Lane(Queue):
    """A device stream or one direction of a link: one operation at a time, first in, first out.

    Times are given to operations in the order of their issue in virtual time. A worker's job may run
    ahead of the training thread, so they are computed as late as they are asked for.
    """

    def __init__(
        self, simulation: "Simulation", name: str, effects: Effects, *, ordered: bool = False
    ) -> None:
        super().__init__(simulation, effects, ordered=ordered)
        self.name = name
        self.free_s = 0.0
        self.busy_s = 0.0
        self.num_bytes = 0
        self._untimed: list[Operation] = []

    def enqueue(
        self, effect: Callable[[], object], *, duration_s: float = 0.0, after: Ticket = FINISHED
    ) -> "Operation":
        """Queue an operation. It starts when ``after`` is done and the lane is free."""
        operation = Operation(self, effect, duration_s, after)
        self._untimed.append(operation)
        self.issue(operation)
        return operation

    def mark(self) -> "Operation":
        """A ticket for everything issued so far."""
        return self.enqueue(_nothing)

    def set_times_through(self, last: "Operation") -> None:
        due = [o for o in self._untimed if o.issued_s <= last.issued_s]
        self._untimed = [o for o in self._untimed if o.issued_s > last.issued_s]
        for operation in sorted(due, key=lambda o: o.issued_s):
            start_s = max(self.free_s, operation.issued_s, operation.after_s)
            self.free_s = start_s + operation.duration_s
            self.busy_s += operation.duration_s
            operation.times_s = (start_s, self.free_s)


class Operation(Pending):
    """Work in a lane: a ticket."""

    def __init__(
        self, lane: Lane, effect: Callable[[], object], duration_s: float, after: Ticket
    ) -> None:
        super().__init__(lane)
        assert isinstance(after, Operation) or after is FINISHED, f"{after!r} is not simulated"
        self._lane = lane
        self._effect: Callable[[], object] | None = effect
        self._after = after if isinstance(after, Operation) else None
        self.issued_s = lane.simulation.now_s
        self.duration_s = duration_s
        self.times_s: tuple[float, float] | None = None

    @property
    def after_s(self) -> float:
        return 0.0 if self._after is None else self._after.finish_s

    @property
    def start_s(self) -> float:
        return self._times()[0]

    @property
    def finish_s(self) -> float:
        return self._times()[1]

    def when_started(self, callback: Callable[[], None]) -> None:
        """Call back when what it waits for has taken effect, unless it then has itself."""
        if self._after is None:
            callback()
        else:
            self._after.when_effective(lambda: None if self.effective else callback())

    def done(self) -> bool:
        if self.finish_s > self._lane.simulation.now_s:
            return False
        self.take_effect()
        return True

    def wait(self) -> None:
        self._lane.simulation.stir()
        self.take_effect()
        self._lane.simulation.current.advance_to(self.finish_s)

    def act(self) -> None:
        effect, self._effect = self._effect, None
        assert effect is not None
        if self._after is not None:
            self._after.take_effect()
        effect()

    def _times(self) -> tuple[float, float]:
        if self.times_s is None:
            self._lane.set_times_through(self)
        assert self.times_s is not None
        return self.times_s


class Simulation:
    """One machine in virtual time, deterministic and in one real thread.

    Attributes:
        main: the training thread.
        current: the thread whose code is running.
        compute: the device's stream.
        to_host, to_device: the link's two directions.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.queues: list[Queue] = []
        self.main = self.current = Actor("main")
        self.compute = Lane(self, "compute", self.policy.compute, ordered=True)
        self.to_host = Lane(self, "to_host", self.policy.links)
        self.to_device = Lane(self, "to_device", self.policy.links)
        self._random = random.Random(self.policy.seed)
        self._stir_chance = self._random.choice((0.01, 0.1, 0.5))
        self._depth = 0

    @property
    def now_s(self) -> float:
        return self.current.now_s

    def clock(self) -> float:
        """Seconds on the running thread's clock."""
        return self.current.now_s

    def spend(self, seconds: float) -> None:
        """The running thread works for some time."""
        self.current.now_s += seconds

    @contextmanager
    def acting(self, actor: Actor) -> Iterator[None]:
        """Run code in another thread's time."""
        before, self.current = self.current, actor
        try:
            yield
        finally:
            self.current = before

    def stir(self) -> None:
        """Let some of what waits take effect, where the policy is ``"random"``."""
        if self._depth or self._random.random() > self._stir_chance:
            return
        for queue in self.queues:
            if queue.effects == "random":
                queue.stir(self._random)

    def carry_out(self, action: Callable[[], None]) -> None:
        """Run one effect; what it issues or waits for does not stir others."""
        self._depth += 1
        try:
            action()
        finally:
            self._depth -= 1


def _nothing() -> None:
    return None
