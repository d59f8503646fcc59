"""The host kernel: the arithmetic of one sweep."""

import functools
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from zenflow.core.rules import Coefficients
from zenflow.kernels import native, reference

_log = logging.getLogger("zenflow")

KERNEL_VARIABLE = "ZENFLOW_KERNEL"
"""Environment variable that forces a kernel by its name."""


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


class NativeKernel:
    """The compiled kernel: one pass over memory, the same bits as :class:`TorchKernel`.

    Args:
        library: where the code is.
        name: which of its instruction sets to use.
    """

    def __init__(self, library: native.Library, name: str) -> None:
        assert name in library.usable
        self.library = library
        self.name = name

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
        assert grads
        self.library.sweep(self.name, state, grads, coefficients, mean=mean, delay=delay, out=out)

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        self.library.sweep(self.name, state, [], [last], mean=False, delay=delay, out=out)


class KernelChoice(NamedTuple):
    """A host kernel, and why it and no better one."""

    kernel: HostKernel
    reason: str


def choose_kernel() -> HostKernel:
    """The kernel to use, with a line in the log the first time. See :func:`kernel_choice`."""
    choice = kernel_choice()
    _announce(choice.kernel.name, choice.reason)
    return choice.kernel


def kernel_choice() -> KernelChoice:
    """The fastest kernel that can run here, or the one that ``ZENFLOW_KERNEL`` names.

    Which one it is changes no bit of a run.

    Raises:
        ValueError: if ``ZENFLOW_KERNEL`` names one that is unknown or cannot run here.
    """
    try:
        library, unavailable = native.load(), ""
    except native.NativeUnavailable as error:
        library, unavailable = None, f"the native kernel is unavailable: {error}"
    forced = os.environ.get(KERNEL_VARIABLE)
    if forced:
        return KernelChoice(_kernel(forced, library, unavailable), f"{KERNEL_VARIABLE} says so")
    if library is None:
        return KernelChoice(TorchKernel(), unavailable)
    lacking = [name for name in library.compiled if name not in library.usable]
    reason = f"this CPU lacks {' and '.join(lacking)}" if lacking else "the best for this CPU"
    return KernelChoice(NativeKernel(library, library.usable[0]), reason)


def _kernel(name: str, library: native.Library | None, unavailable: str) -> HostKernel:
    if name == TorchKernel.name:
        return TorchKernel()
    usable = library.usable if library else ()
    if library is not None and name in usable:
        return NativeKernel(library, name)
    known = (TorchKernel.name, *native.INSTRUCTION_SETS)
    raise ValueError(
        f"{KERNEL_VARIABLE}={name!r} "
        + ("cannot run here" if name in known else f"must be one of {', '.join(known)}")
        + f"; possible here: {', '.join((TorchKernel.name, *usable))}"
        + (f" ({unavailable})" if unavailable else "")
    )


@functools.cache
def _announce(name: str, reason: str) -> None:
    if name == TorchKernel.name and not reason.startswith(KERNEL_VARIABLE):
        _log.warning("host kernel: plain torch, several times slower, because %s", reason)
    else:
        _log.info("host kernel: %s (%s)", name, reason)
