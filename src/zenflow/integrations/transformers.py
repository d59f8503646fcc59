"""ZenFlow inside the Hugging Face ``Trainer`` and the trainers built on it (TRL, ...).

The optimizer needs no more than ``Trainer(optimizer_cls_and_kwargs=(ZenFlowAdamW, {...}))``. What
a trainer cannot know is that some gradients still wait on the host when it evaluates or saves;
:class:`ZenFlowCallback` applies them first.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zenflow.optimizer import ZenFlowAdamW
from zenflow.runtime.stats import StepStats


@dataclass(slots=True)
class RunTotals:
    """Figures of a run so far, added over its steps. ``loop_s`` leaves evaluation and saving out."""

    steps: int = 0
    skipped_steps: int = 0
    loop_s: float = 0.0
    stall_s: float = 0.0
    drain_s: float = 0.0
    """Seconds that :meth:`ZenFlowAdamW.synchronize` took before evaluations and saves."""
    step_overhead_s: float = 0.0
    host_busy_s: float = 0.0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    traffic_model_sizes: float = 0.0
    staleness_max_steps: int = 0
    reselected_channels: int = 0

    @property
    def stall_fraction(self) -> float:
        """Share of the loop's time spent waiting for host work or the link, drains included."""
        return (self.stall_s + self.drain_s) / self.loop_s if self.loop_s > 0 else 0.0

    @property
    def traffic_per_step(self) -> float:
        """Bytes across the link in a step, in model sizes, as a mean over the steps."""
        return self.traffic_model_sizes / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready; ``RunTotals(**d)`` goes on from them."""
        return asdict(self)

    def add(self, stats: StepStats) -> None:
        """Add one step's figures."""
        self.skipped_steps += int(stats.skipped)
        self.stall_s += stats.stall_s
        self.step_overhead_s += stats.step_overhead_s
        self.host_busy_s += stats.host_busy_s
        self.d2h_bytes += stats.d2h_bytes
        self.h2d_bytes += stats.h2d_bytes
        self.traffic_model_sizes += stats.traffic_model_sizes
        self.staleness_max_steps = max(self.staleness_max_steps, stats.staleness_steps)
        self.reselected_channels += stats.reselected_channels


def unwrap_optimizer(optimizer: object) -> ZenFlowAdamW | None:
    """The :class:`ZenFlowAdamW` inside a trainer's optimizer (Accelerate wraps it), or None."""
    while optimizer is not None and not isinstance(optimizer, ZenFlowAdamW):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


class ZenFlowCallback(TrainerCallback):
    """Makes the weights current before every evaluation and save, and adds up the steps' figures.

    A callback of one's own that sets ``control.should_save`` or ``control.should_evaluate`` has to
    stand before this one in the trainer's list; the trainer's own flow always does. With another
    optimizer only ``steps`` and ``loop_s`` are counted.

    Args:
        totals: figures to go on from, for a resumed run.

    Example::

        trainer = Trainer(
            ...,
            optimizer_cls_and_kwargs=(ZenFlowAdamW, {"lr": 1e-5, "config": {"topk_ratio": 0.1}}),
            callbacks=[ZenFlowCallback()],
        )
    """

    def __init__(self, totals: RunTotals | None = None) -> None:
        self.totals = totals if totals is not None else RunTotals()
        self.last: StepStats | None = None
        """Figures of the last step; None before it, or with another optimizer."""
        self._mark_s = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._mark_s = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step; drain if the trainer is about to evaluate, save or stop."""
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        self.totals.steps += 1
        if optimizer is not None:
            self.last = optimizer.stats
            self.totals.add(self.last)
            if control.should_evaluate or control.should_save or control.should_training_stop:
                self._drain(optimizer)
        self._lap()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drain where an evaluation or save belongs to the end of the epoch."""
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None and (control.should_evaluate or control.should_save):
            self._drain(optimizer)
        self._lap()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the evaluation out of the loop's time."""
        self._mark_s = time.perf_counter()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the save out of the loop's time."""
        self._mark_s = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply what still waits, so that the trained model is whole."""
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None:
            self._drain(optimizer)

    def _drain(self, optimizer: ZenFlowAdamW) -> None:
        start_s = time.perf_counter()
        optimizer.synchronize()
        self.totals.drain_s += time.perf_counter() - start_s

    def _lap(self) -> None:
        now_s = time.perf_counter()
        self.totals.loop_s += now_s - self._mark_s
        self._mark_s = now_s
