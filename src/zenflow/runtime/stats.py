"""What a step did and what it cost."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Figures of the last ``step()``; JSON-ready through :meth:`to_dict`."""

    step: int = 0
    """Applied steps so far; a skipped step is not counted."""
    stall_s: float = 0.0
    """Seconds that ``step()`` waited for host work or the link."""
    step_overhead_s: float = 0.0
    """Seconds that ``step()`` took beside the stall, on the training thread's clock."""
    host_busy_s: float = 0.0
    """Seconds that workers spent in the sweeps published by this step, added over threads."""
    d2h_bytes: int = 0
    """Gradient bytes handed to the host. Where memory is shared nothing moves; the figure is what a
    link would carry."""
    h2d_bytes: int = 0
    """Weight bytes published, counted in the same way."""
    traffic_model_sizes: float = 0.0
    """``d2h_bytes + h2d_bytes`` over the bytes of all trained weights."""
    update_interval: int = 0
    """Update interval S of this step, in steps."""
    staleness_steps: int = 0
    """Most steps that a weight, as visible now, lags behind AdamW."""
    selected_channels: int = 0
    """Channels updated on the device, added over weights."""
    reselected_channels: int = 0
    """Channels that became selected in this step, added over weights."""
    skipped: bool = False
    """True if a gradient was not finite: nothing was changed."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as numbers and booleans."""
        return dataclasses.asdict(self)

    def replaced(self, **changes: Any) -> "StepStats":
        """These figures with some of them changed."""
        return dataclasses.replace(self, **changes)

    def of_no_work(self, *, skipped: bool = False) -> "StepStats":
        """The figures after a step that changed nothing: the state as it was."""
        return StepStats(
            step=self.step,
            update_interval=self.update_interval,
            staleness_steps=self.staleness_steps,
            selected_channels=self.selected_channels,
            skipped=skipped,
        )


class Meter:
    """The running figures of one step.

    Args:
        clock: seconds; only differences are used.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.begin_s = clock()
        self.stall_s = 0.0
        self.reset()

    def begin_step(self) -> None:
        """``step()`` begins; what a streaming backward pass counted so far belongs to this step."""
        self.begin_s = self.clock()
        self._stall_before_s = self.stall_s

    @property
    def stall_in_step_s(self) -> float:
        """The part of the stall that is inside ``step()``."""
        return self.stall_s - self._stall_before_s

    def reset(self) -> None:
        """A step's figures have been taken."""
        self._stall_before_s = 0.0
        self.stall_s = 0.0
        self.host_busy_s = 0.0
        self.host_finished_s = 0.0
        self.d2h_bytes = 0
        self.h2d_bytes = 0
        self.reselected_channels = 0

    def stall(self) -> "_Stall":
        """Count the time inside as waiting for host work or the link."""
        return _Stall(self)


class _Stall:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._begin_s = self._meter.clock()

    def __exit__(self, *_: object) -> None:
        self._meter.stall_s += self._meter.clock() - self._begin_s
