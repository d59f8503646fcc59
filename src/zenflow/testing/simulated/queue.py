"""Queued work: it has been issued and has yet to take effect."""

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from zenflow.testing.simulated.policy import Effects

if TYPE_CHECKING:
    from zenflow.testing.simulated.clock import Simulation


class Queue:
    """What takes effect in the order of issue: a lane, or the jobs of the host workers."""

    def __init__(
        self, simulation: "Simulation", effects: Effects, *, ordered: bool = False
    ) -> None:
        assert not (ordered and effects == "loose"), "work on a stream never overtakes"
        self.simulation = simulation
        self.effects = effects
        self.pending: deque[Pending] = deque()
        self._overtakes = effects in ("loose", "random") and not ordered
        simulation.queues.append(self)

    def issue(self, work: "Pending") -> None:
        """Queue work; it takes effect now if that is the policy."""
        self.pending.append(work)
        if self.effects == "early":
            work.take_effect()
        self.simulation.stir()

    def take_effect_of(self, work: "Pending") -> None:
        """Let ``work`` take effect, behind all that is queued before it unless it overtakes."""
        while not work.effective:
            self._next(work if self._overtakes else self.pending[0])

    def stir(self, draw: random.Random) -> None:
        """Let some of what waits take effect."""
        waiting = list(self.pending)
        if self._overtakes:
            draw.shuffle(waiting)
        for work in waiting[: draw.randint(0, len(waiting))]:
            self.take_effect_of(work)

    def drain(self) -> None:
        """Let everything take effect."""
        while self.pending:
            self._next(self.pending[0])

    def _next(self, work: "Pending") -> None:
        self.pending.remove(work)
        self.simulation.carry_out(work.run)


class Pending:
    """Queued work that takes effect once, on its turn."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.effective = False
        self._callbacks: list[Callable[[], None]] = []

    def take_effect(self) -> None:
        self.queue.take_effect_of(self)

    def when_effective(self, callback: Callable[[], None]) -> None:
        """Call back right behind the effect, or now if that is past."""
        if self.effective:
            callback()
        else:
            self._callbacks.append(callback)

    def run(self) -> None:
        try:
            self.act()
        finally:
            self.effective = True
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def act(self) -> None:
        raise NotImplementedError
