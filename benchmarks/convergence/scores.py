"""Other scores of a channel than the squared norm of one gradient, to be compared at equal k."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from zenflow.core.selection import channel_energy
from zenflow.runtime.engine import Engine
from zenflow.runtime.weight import Weight

Score = Literal["smoothed", "gain", "random"]
_DECAY = 0.9
_DECAY_SQUARE = 0.99
_EPS = 1e-12


def use_score(engine: Engine, score: Score) -> None:
    """Let an engine choose channels by another score.

    - ``"smoothed"``: the squared norm, averaged over steps with decay 0.9.
    - ``"gain"``: what AdamW's update of the column takes off the loss to first order, ``sum(g * m /
      sqrt(v))`` with moments of this module's own: what is lost in every step that it is late.
    - ``"random"``: none at all.
    """
    scorer = _SCORERS[score]()
    platform = engine.platform
    kernel = _Kernel(platform.device_kernel)
    engine.platform = replace(platform, device_kernel=kernel)  # type: ignore[arg-type]
    select = engine._select

    def observed(weight: Weight, grad: Tensor, step: int) -> None:
        kernel.score_C = scorer(weight, grad)
        select(weight, grad, step)

    engine._select = observed  # type: ignore[method-assign]


class _Kernel:
    """A device kernel with the energy of another."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.score_C = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def energy(self, grad: Tensor) -> Tensor:
        return self.score_C.clone()


class _Smoothed:
    def __init__(self) -> None:
        self._averages: dict[Weight, Tensor] = {}

    def __call__(self, weight: Weight, grad: Tensor) -> Tensor:
        energy_C = channel_energy(grad)
        before = self._averages.get(weight, energy_C)
        self._averages[weight] = torch.lerp(energy_C, before, _DECAY)
        return self._averages[weight]


class _Gain:
    def __init__(self) -> None:
        self._moments: dict[Weight, tuple[Tensor, Tensor]] = {}

    def __call__(self, weight: Weight, grad: Tensor) -> Tensor:
        grad = grad.float()
        mean, square = self._moments.get(weight, (grad, grad.square()))
        mean, square = (
            torch.lerp(grad, mean, _DECAY),
            torch.lerp(grad.square(), square, _DECAY_SQUARE),
        )
        self._moments[weight] = mean, square
        return (grad * mean / (square.sqrt() + _EPS)).sum(0)  # the tasks have matrices only


class _Random:
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, weight: Weight, grad: Tensor) -> Tensor:
        return torch.rand(grad.shape[1], generator=self._generator)


_SCORERS: dict[str, Callable[[], Callable[[Weight, Tensor], Tensor]]] = {
    "smoothed": _Smoothed,
    "gain": _Gain,
    "random": _Random,
}
