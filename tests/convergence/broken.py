"""Rules that are broken on purpose: what the quick convergence test has to notice."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zenflow
from zenflow.backends.host_kernel import HostKernel, HostState
from zenflow.core.rules import Coefficients, SubStep
from zenflow.runtime.engine import Engine
from zenflow.runtime.platform import Platform
from zenflow.runtime.segment import Segment


class BrokenKernel:
    """The kernel at hand, with something wrong in what it is asked to do."""

    name = "broken"

    def __init__(self, kernel: HostKernel, **faults: bool) -> None:
        self._kernel = kernel
        self._faults = faults

    def sweep(
        self,
        state: HostState,
        grads: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
        *,
        mean: bool,
        delay: float,
        out: Tensor,
    ) -> None:
        if self._faults.get("drops_slots"):
            grads, coefficients = grads[-1:], coefficients[-1:]
        if self._faults.get("takes_one_step"):
            mean = True
        if self._faults.get("looks_back"):
            delay = -delay
        self._kernel.sweep(state, grads, coefficients, mean=mean, delay=delay, out=out)

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        self._kernel.write(state, last, delay, out)


def with_kernel(**faults: bool) -> type[zenflow.ZenFlowAdamW]:
    class Broken(zenflow.ZenFlowAdamW):
        def _make_platform(self, device: torch.device) -> Platform:
            platform = super()._make_platform(device)
            return dataclasses.replace(platform, kernel=BrokenKernel(platform.kernel, **faults))

    return Broken


class ForgetsAtHandover(zenflow.ZenFlowAdamW):
    """Channels that change sides begin with zero moments, at the step count that they had."""

    def _new_engine(self) -> Engine:
        engine = super()._new_engine()
        for weight in engine.weights.values():
            weight.segments[:] = [_forgetful(segment) for segment in weight.segments]
        for table in engine.pipeline.tables:
            table.segments[:] = [s for w in engine.weights.values() for s in w.segments]
        return engine


class _ForgetfulSegment(Segment):
    __slots__ = ()

    def adopt(self, platform: Platform, chosen: Tensor, substep: SubStep) -> int:
        handover = self.channels.handover_to(chosen)
        moved = Segment.adopt(self, platform, chosen, substep)
        if handover is not None:
            for moment in platform.storage.fetch(self.key)[1:]:
                moment.index_fill_(1, handover.host_to, 0.0)
            for moment in self.selected[1:]:
                moment.index_fill_(1, handover.places, 0.0)
        return moved


def _forgetful(segment: Segment) -> Segment:
    parts = (segment.key, segment.weight, segment.start, segment.stop, segment.is_whole)
    return _ForgetfulSegment(*parts)


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "slots are dropped": ("low lr", with_kernel(drops_slots=True)),
    "one step with the mean, not one for each gradient": (
        "low lr",
        with_kernel(takes_one_step=True),
    ),
    "lookahead has the wrong sign": ("high lr", with_kernel(looks_back=True)),
    "moments are zeroed at a handover": ("many handovers", ForgetsAtHandover),
}
"""What is wrong, the setting of ``test_quick.py`` in which it shows, and an optimizer with that fault."""
