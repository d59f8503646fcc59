"""What the training loop asks of a task."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from benchmarks.convergence.settings import TaskSettings


class Task(Protocol):
    """Made once for each process; holds its data, not a model."""

    settings: TaskSettings

    def __init__(self, cache: Path) -> None:
        """Read what :meth:`prepare` has left in ``cache``."""
        ...

    def model(self, seed: int) -> nn.Module:
        """The model that a run of this seed starts from."""
        ...

    def batch(self, seed: int, step: int) -> Any:
        """The batch of a step, from 1; the same for every method."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of a batch."""
        ...

    def heldout(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data; ``"loss"`` is always one of them."""
        ...


def step_seed(seed: int, step: int) -> int:
    """A seed for what is drawn in one step of one run."""
    return seed * 1_000_003 + step
