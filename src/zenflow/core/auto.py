"""Zen-auto: the update interval as a pure function of what was measured."""

from collections import deque
from statistics import median
from typing import NamedTuple

_PATIENCE = 4
"""Steps measured at an interval before it may change again."""
_FULL = 0.95
"""Share of the time beside compute that host work may fill before it is about to stall."""
_SLACK = 0.7
"""The interval shrinks only if host work would then fill less than this share."""
_HOLD = 8
"""Steps for which an interval that has just grown does not shrink; doubled each time that shrinking
turns out to have been wrong, since then something comes and goes, or is at work that ``host_s`` does
not show."""
_MAX_HOLD = 1024
_PROVEN = 16
"""A smaller interval was right once it has lasted so many times the hold."""


class Sample(NamedTuple):
    """One step's measurement, in seconds.

    Attributes:
        window_s: from the start of the sweeps to the next ``step()``: the time they may take
            unseen.
        host_s: from the start of the sweeps to the end of the last.
    """

    window_s: float
    host_s: float


class ZenAuto:
    """Chooses the smallest update interval whose host work fits beside compute.

    Starts at 1, since staleness costs most early. Host time per step is at most inversely
    proportional to the interval (a sweep's fixed part is shared by its slots), which bounds what a
    smaller one would cost; the gap between the two thresholds, and a hold after each growth, keep it
    from swinging.

    Args:
        max_interval: never exceeded, in steps.
    """

    def __init__(self, max_interval: int, interval: int = 1) -> None:
        self.max_interval = max_interval
        self.interval = min(interval, max_interval)
        self.reason = "start"
        self._samples: deque[Sample] = deque(maxlen=_PATIENCE)
        self._hold = _HOLD
        self._held = 0
        self._on_trial = 0

    def observe(self, sample: Sample) -> bool:
        """Take one step's measurement; True if the interval changes with the next step."""
        self._samples.append(sample)
        self._held = max(0, self._held - 1)
        self._on_trial = max(0, self._on_trial - 1)
        if self._on_trial == 1:
            self._hold = _HOLD
        if len(self._samples) < _PATIENCE:
            return False
        window_s = median(s.window_s for s in self._samples)
        host_s = median(s.host_s for s in self._samples)
        chosen = self._choose(window_s, host_s)
        if chosen == self.interval:
            return False
        self.reason = (
            f"host work of {host_s * 1e3:.1f} ms at interval {self.interval} "
            f"against {window_s * 1e3:.1f} ms beside compute"
        )
        self._note(grows=chosen > self.interval)
        self.interval = chosen
        self._samples.clear()
        return True

    def _note(self, *, grows: bool) -> None:
        """Remember whether an interval that shrank has had to grow again."""
        if grows:
            if self._on_trial:
                self._hold = min(2 * self._hold, _MAX_HOLD)
            self._held = self._hold
        self._on_trial = 0 if grows else _PROVEN * self._hold

    def _choose(self, window_s: float, host_s: float) -> int:
        if host_s > _FULL * window_s:
            return min(self.interval + 1, self.max_interval)
        if self.interval > 1 and not self._held:
            smaller_s = host_s * self.interval / (self.interval - 1)
            if smaller_s < _SLACK * window_s:
                return self.interval - 1
        return self.interval
