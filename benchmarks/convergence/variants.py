"""What the bench needs of the optimizer and the product has no option for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import zenflow
from benchmarks.convergence.scores import Score, use_score
from zenflow.runtime.controller import RecordedInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.segment import Segment


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Departures from the product; None is none.

    Attributes:
        together: all windows end in the same steps, as in the published implementation.
        delay: steps that published weights are extrapolated by.
        momentum: extrapolate by the part of the next updates that momentum has already decided,
            see :func:`decided_steps`.
        trace: ``(first step, interval)`` of each update interval, instead of Zen-auto's choices.
        share: of an update that previews show.
        score: of channels, see :func:`use_score`.
    """

    together: bool | None = None
    delay: float | None = None
    momentum: bool | None = None
    trace: tuple[tuple[int, int], ...] | None = None
    share: float | None = None
    score: Score | None = None


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
        if self._variant.share is not None:
            engine.previews.share = self._variant.share
        if self._variant.score is not None:
            use_score(engine, self._variant.score)
        start_sweep, variant = engine.pipeline.start_sweep, self._variant

        def started(segment: Segment, delay: float) -> None:
            if delay and variant.delay is not None:
                delay = variant.delay
            if delay and variant.momentum:
                last = segment.waiting[-1].substep
                delay = decided_steps(delay, last.beta1, last.step)
            start_sweep(segment, delay)

        engine.pipeline.start_sweep = started
        return engine


def decided_steps(delay: float, beta1: float, step: int) -> float:
    """How many times the last update the next ``delay`` updates will be if their gradients are zero
    on average.

    The first moment then falls by ``beta1`` a step, and its bias correction by a known factor: early in
    training, an update is mostly the last gradient's sign, and the next ones repeat little of it.
    """
    total, j = 0.0, 1
    while delay > 0:
        share = beta1**j * (1 - beta1**step) / (1 - beta1 ** (step + j))
        total += min(delay, 1.0) * share
        delay, j = delay - 1, j + 1
    return total


def param_norm(params: Iterable[Tensor]) -> float:
    """The norm of all parameters: shows at a glance whether two runs are the same."""
    return sum(float(p.detach().double().square().sum()) for p in params) ** 0.5
