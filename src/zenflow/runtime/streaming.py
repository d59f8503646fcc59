"""Streaming capture: each gradient is taken as soon as the backward pass has completed it.

What is left in ``.grad`` is a :class:`TakenGradient`, which has no memory and refuses every use with a
remedy. So a foreign clipping function, a scaler or a second backward pass is an error and never silent.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Absorb = Callable[[Tensor], None]


class TakenGradient(Tensor):
    """Stands in ``.grad`` for a gradient that has left the device."""

    @classmethod
    def of(cls, param: Tensor) -> "TakenGradient":
        """One that may be assigned to ``param.grad``."""
        taken: TakenGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, strides=param.stride()
        )
        return taken

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called on a gradient that streaming capture has already taken. To clip, "
            "set ZenFlowConfig(max_grad_norm=...) and turn clipping off elsewhere; to accumulate, "
            "run all but the last backward pass inside `with optimizer.accumulate():`; to read "
            "gradients or to use a GradScaler, set stream_gradients=False"
        )


class GradientStream:
    """The hooks of one optimizer.

    Args:
        absorb: takes the gradient that lies in ``param.grad``; called in the backward pass.
    """

    def __init__(self, absorb: Absorb) -> None:
        self._absorb = weakref.WeakMethod(absorb)
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._accumulating = 0

    def attach(self, params: Iterable[Tensor]) -> None:
        """Hook parameters that require gradients and are not hooked yet."""
        for param in params:
            if param.requires_grad and param not in self._handles:
                handle = param.register_post_accumulate_grad_hook(self._hook)
                self._handles[param] = handle

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

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
        absorb(param)
        param.grad = TakenGradient.of(param)


def was_taken(param: Tensor) -> bool:
    """Whether ``.grad`` still stands for a gradient that was taken."""
    return isinstance(param.grad, TakenGradient)


def _accelerate_accumulates() -> bool:
    """Whether Accelerate, if it is in use, says that this backward pass is not a step's last."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.GradientState._shared_state:
        return False
    return not state.GradientState().sync_gradients
