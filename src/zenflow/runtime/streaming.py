"""Streaming capture: each gradient is taken as soon as the backward pass has completed it.

What is left in ``.grad`` is a :class:`TakenGradient`, which has no memory. It can be clipped by its norm
and refuses every other use with a remedy, so that a scaler or a second backward pass is never silent.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zenflow.runtime import interrupts


class TakenGradient(Tensor):
    """Stands in ``.grad`` for a gradient that has left the device.

    It knows its 2-norm and remembers what it is multiplied by, so ``clip_grad_norm_`` works as it is: the
    factor becomes the scale of the gradient's sub-step. Everything else is refused.

    Attributes:
        known_norm: of the gradient with its factors. The runtime holds the same tensor, so what a step
            checks and clips is the gradient as the user has scaled it.
        factors: what it was multiplied by.
    """

    known_norm: Tensor
    factors: list[Tensor | float]

    @classmethod
    def of(cls, param: Tensor, dtype: torch.dtype, norm: Tensor) -> "TakenGradient":
        """One that may be assigned to ``param.grad``; dtype and norm are the gradient's."""
        taken: TakenGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=dtype, device=param.device, strides=param.stride()
        )
        taken.known_norm = norm
        taken.factors = []
        return taken

    def scale(self) -> float:
        """The product of what it was multiplied by."""
        return math.prod(float(factor) for factor in self.factors)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        taken = args[0] if args and isinstance(args[0], cls) else None
        if taken is not None and func is _NORM and _is_whole_two_norm(args):
            return taken.known_norm.clone()
        if taken is not None and func in _SCALINGS and _is_number(args[1]):
            factor = args[1]
            taken.factors.append(factor)
            size = factor.abs().reshape(()) if isinstance(factor, Tensor) else abs(factor)
            taken.known_norm.mul_(size)
            return taken
        raise RuntimeError(
            f"{func} was called on a gradient that streaming capture has already taken. To clip, "
            "use clip_grad_norm_ or ZenFlowConfig(max_grad_norm=...); to accumulate, run all but "
            "the last backward pass inside `with optimizer.accumulate():` (in Lightning, "
            "ZenFlowLightningCallback does it); to checkpoint a layer that is used twice, set "
            "use_reentrant=False; to read gradients or to use a GradScaler, set stream_gradients=False"
        )


_NORM = torch.ops.aten.linalg_vector_norm.default
_SCALINGS = (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar)


def _is_whole_two_norm(args: Any) -> bool:
    """Whether these are the arguments of a 2-norm over every dimension."""
    order = args[1] if len(args) > 1 else 2
    return float(order) == 2.0 and (len(args) < 3 or args[2] is None)


def _is_number(factor: Any) -> bool:
    if isinstance(factor, Tensor):
        return factor.numel() == 1
    return isinstance(factor, (int, float))


class GradientStream:
    """The hooks of one optimizer. They go when it goes, or when a later one hooks the same parameters.

    Args:
        absorb: the optimizer's method that takes the gradient that lies in ``param.grad`` and returns its
            norm; called in the backward pass.
    """

    def __init__(self, absorb: Callable[[Tensor], Tensor]) -> None:
        assert isinstance(absorb, MethodType)
        self._absorb = weakref.WeakMethod(absorb)
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._accumulating = 0
        self._superseded = False
        weakref.finalize(absorb.__self__, self.detach).atexit = False

    def attach(self, params: Iterable[Tensor]) -> None:
        """Hook parameters that require gradients and are not hooked yet.

        Raises:
            RuntimeError: if an optimizer built later has hooked some of them since.
        """
        if self._superseded:
            raise RuntimeError(
                "an optimizer that was built later streams gradients of this one's parameters; "
                "close() the one that is not needed any more"
            )
        for param in params:
            if param.requires_grad and param not in self._handles:
                for other in _streams_of(param):
                    other._release(param)
                    other._superseded = True
                handle = param.register_post_accumulate_grad_hook(self._hook)
                self._handles[param] = handle

    def detach(self) -> None:
        """Remove every hook, and what stands for gradients that no step has applied."""
        for param in list(self._handles):
            self._release(param)

    def _release(self, param: Tensor) -> None:
        self._handles.pop(param).remove()
        if isinstance(param.grad, TakenGradient):
            param.grad = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Leave gradients in ``.grad``, where the next backward pass adds to them."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @torch.no_grad()
    def _hook(self, param: Tensor) -> None:
        absorb = self._absorb()
        if absorb is None or self._accumulating or _accelerate_accumulates():
            return
        assert param.grad is not None
        dtype = param.grad.dtype
        with interrupts.whole():
            norm = absorb(param)
            param.grad = TakenGradient.of(param, dtype, norm)


def _streams_of(param: Tensor) -> list[GradientStream]:
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    return [owner for owner in owners if isinstance(owner, GradientStream)]


def _accelerate_accumulates() -> bool:
    """Whether Accelerate, if it is in use, says that this backward pass is not a step's last."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.GradientState._shared_state:
        return False
    return not state.GradientState().sync_gradients
