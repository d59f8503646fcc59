"""How ranks that hold parts of one weight agree on its channels' energy."""

from typing import Protocol

from torch import Tensor


class Reduce(Protocol):
    """One method: ranks share ``C`` floats a weight, never the gradient."""

    def sum(self, energy_C: Tensor) -> None:
        """Replace fp32 ``energy_C`` by its sum over the ranks, in place, as device work."""
        ...


class LocalReduce:
    """One process holds whole weights: nothing to add."""

    def sum(self, energy_C: Tensor) -> None:
        return None
