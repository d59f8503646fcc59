"""Who says how long the next windows are: a fixed interval, Zen-auto, or a recorded trace."""

import logging
from collections.abc import Sequence
from typing import Protocol

from zenflow.config import ZenFlowConfig
from zenflow.core.auto import Sample, ZenAuto

_log = logging.getLogger("zenflow")


class Controller(Protocol):
    """Two methods: what holds for a step, and what was measured."""

    def interval(self, step: int) -> int:
        """The update interval of applied step ``step``; asked once for each step, in order."""
        ...

    def observe(self, sample: Sample) -> None:
        """How the sweeps of the previous step fitted beside compute."""
        ...


class FixedInterval:
    """An integer ``update_interval``, or a synchronous "auto", which has nothing to hide and takes
    1."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def interval(self, step: int) -> int:
        return self._interval

    def observe(self, sample: Sample) -> None:
        return None


class AutoInterval:
    """Zen-auto. Its choices depend on the clock, so they are recorded.

    Attributes:
        trace: ``(first step, interval)`` of each choice; :class:`RecordedInterval` replays it.
    """

    def __init__(self, max_interval: int) -> None:
        self._max_interval = max_interval
        self._auto = ZenAuto(max_interval)
        self.trace: list[tuple[int, int]] = []

    def interval(self, step: int) -> int:
        interval = self._auto.interval
        if not self.trace or self.trace[-1][1] != interval:
            self.trace.append((step, interval))
        return interval

    def resume(self, trace: Sequence[tuple[int, int]]) -> None:
        """Go on from a saved trace."""
        self.trace = list(trace)
        if self.trace:
            self._auto = ZenAuto(self._max_interval, self.trace[-1][1])

    def observe(self, sample: Sample) -> None:
        if self._auto.observe(sample):
            _log.info("update interval %d: %s", self._auto.interval, self._auto.reason)


class RecordedInterval:
    """The choices of an earlier run, step for step."""

    def __init__(self, trace: Sequence[tuple[int, int]]) -> None:
        self._trace = list(trace)

    def interval(self, step: int) -> int:
        return [interval for first, interval in self._trace if first <= step][-1]

    def observe(self, sample: Sample) -> None:
        return None


def make_controller(config: ZenFlowConfig) -> Controller:
    """The controller that a config asks for."""
    if config.update_interval != "auto":
        return FixedInterval(config.update_interval)
    if not config.overlap_step:
        return FixedInterval(1)
    return AutoInterval(config.max_update_interval)
