"""What the bench needs of the optimizer and the product has no option for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import zenflow
from zenflow.core.channels import channel_view
from zenflow.runtime.controller import RecordedInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.resident import identity
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
        provisional: share of a gradient's own update that its weights show before the host has applied
            it, see :class:`Provisional`.
    """

    together: bool | None = None
    delay: float | None = None
    momentum: bool | None = None
    trace: tuple[tuple[int, int], ...] | None = None
    provisional: float | None = None


class VariantAdamW(zenflow.ZenFlowAdamW):
    """The product's optimizer with a variant's departures."""

    def __init__(
        self, params: Iterable[Any], lr: float, *, variant: Variant, **others: Any
    ) -> None:
        self._variant = variant
        self._provisional: Provisional | None = None
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
        if self._variant.provisional is not None:
            self._provisional = Provisional(engine, self._variant.provisional)
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

    def _take_step(self) -> None:
        grads = {} if self._variant.provisional is None else self._gradients()
        super()._take_step()
        if self._provisional is not None:
            self._provisional.show(grads)

    def _gradients(self) -> dict[Tensor, tuple[Tensor, float]]:
        """Of each parameter, with its learning rate."""
        return {
            param: (param.grad, float(group["lr"]))
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        }


class Provisional:
    """Deferred weights show each gradient at once, roughly, and exactly once the host has applied it.

    In the step of its own gradient ``g`` a deferred weight moves by ``lr * share * g / sqrt(v)``, bounded,
    where ``v`` is the rank-one approximation of the second moment, from its means over rows and over
    columns at the last publish (Adafactor's, arXiv:1804.04235). That is a few numbers a row and column
    on the device. The next publish, which has applied the gradient, overwrites it.

    Args:
        share: of the update.
    """

    BOUND = 3.0
    """Of one gradient over the root of its second moment; AdamW's update seldom exceeds 1."""

    def __init__(self, engine: Engine, share: float) -> None:
        self._engine = engine
        self._share = share
        self._means: dict[int, tuple[Tensor, Tensor]] = {}
        write = engine.pipeline._write

        def written(ready: Any) -> None:
            write(ready)
            for segment, *_ in ready:
                self._keep_means(segment)

        engine.pipeline._write = written

    def _keep_means(self, segment: Segment) -> None:
        storage = self._engine.platform.storage
        assert segment.channels is not None and segment.last is not None
        places = segment.channels.deferred_places()
        second = storage.fetch(segment.key).exp_avg_sq.flatten(1)
        if len(places) < second.shape[1]:
            second = second.index_select(1, places)
        second = second / (1 - segment.last.beta2**segment.host_steps)
        self._means[segment.key] = second.mean(1), second.mean(0)

    def show(self, grads: Mapping[Tensor, tuple[Tensor, float]]) -> None:
        """Move what waits for the gradients of the step that was just taken."""
        for weight in self._engine.weights.values():
            if weight.param not in grads:
                continue
            grad, lr = grads[weight.param]
            for segment in weight.segments:
                if segment.key in self._means and (segment.waiting or segment.sweep is not None):
                    self._move(segment, segment.rows_of(channel_view(grad)), lr)
            weight.seen = identity(weight.param)

    def _move(self, segment: Segment, grad: Tensor, lr: float) -> None:
        assert segment.channels is not None and segment.last is not None
        rows, columns = self._means[segment.key]
        places = segment.channels.deferred_places()
        second = rows[:, None] * (columns / columns.mean().clamp_min(1e-30))[None, :]
        update = grad.flatten(1).index_select(1, places).float() / (
            second.sqrt() + segment.last.eps
        )
        update = update.clamp_(-self.BOUND, self.BOUND).mul_(lr * self._share)
        flat = segment.weight.flatten(1)
        flat.index_add_(1, places, update.neg_().to(flat.dtype))
        segment.watch(self._engine.platform)


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
