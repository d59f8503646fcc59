"""The host kernel: the arithmetic of one sweep."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from zenflow.core.rules import Coefficients
from zenflow.kernels import reference


class HostState(NamedTuple):
    """One segment's optimizer state in host memory: three contiguous fp32 tensors of one shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class HostKernel(Protocol):
    """Two methods: apply what waits and write weights, or only write weights."""

    name: str

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
        """Apply every gradient to ``state`` in place, then write the weights to ``out``.

        Args:
            grads: at least one, contiguous, of the state's shape, fp32/bf16/fp16, oldest first.
            coefficients: one for each gradient. With ``mean``, the update uses the last one, and
                the others only give their gradient's scale.
            mean: one update with the mean gradient ("accumulate") instead of one for each
                ("replay").
            delay: steps to extrapolate the written weights by; 0 writes the master.
            out: the weights' dtype, the state's shape, contiguous.
        """
        ...

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        """Write the weights that a sweep ending with ``last`` writes, without applying anything."""
        ...


class TorchKernel:
    """Plain torch operations, everywhere available; the oracle of faster kernels."""

    name = "torch"

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
        reference.sweep(*state, grads, coefficients, mean=mean, delay=delay, out=out)

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        reference.write(*state, last, delay, out)
