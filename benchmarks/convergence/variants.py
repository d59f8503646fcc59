"""What the bench needs of the optimizer and the product has no option for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import zenflow
from zenflow.runtime.controller import RecordedInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.segment import Segment


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Departures from the product; None is none.

    Attributes:
        together: all windows end in the same steps, as in the published implementation.
        delay: steps that published weights are extrapolated by.
        trace: ``(first step, interval)`` of each update interval, instead of Zen-auto's choices.
    """

    together: bool | None = None
    delay: float | None = None
    trace: tuple[tuple[int, int], ...] | None = None


class VariantAdamW(zenflow.ZenFlowAdamW):
    """The product's optimizer with a variant's departures."""

    def __init__(
        self, params: Iterable[Any], lr: float, *, variant: Variant, **others: Any
    ) -> None:
        self._variant = variant
        super().__init__(params, lr, **others)

    @property
    def engine(self) -> Engine:
        """The engine, after the first step."""
        assert self._engine is not None
        return self._engine

    def _new_engine(self) -> Engine:
        engine = super()._new_engine()
        if self._variant.trace is not None:
            engine.controller = RecordedInterval(self._variant.trace)
        if self._variant.together:
            for table in engine.pipeline.tables:
                num_segments = len(table.segments)
                table.phases = lambda _, count=num_segments: [0] * count
        if self._variant.delay is not None:
            _look_ahead_by(engine, self._variant.delay)
        return engine


def _look_ahead_by(engine: Engine, steps: float) -> None:
    start_sweep = engine.pipeline.start_sweep

    def started(segment: Segment, delay: float) -> None:
        start_sweep(segment, steps if delay else 0.0)

    engine.pipeline.start_sweep = started


def param_norm(params: Iterable[Tensor]) -> float:
    """The norm of all parameters: shows at a glance whether two runs are the same."""
    return sum(float(p.detach().double().square().sum()) for p in params) ** 0.5
