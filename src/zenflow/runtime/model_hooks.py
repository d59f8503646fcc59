"""Hooks on the user's model that keep what is saved and evaluated current."""

import weakref
from typing import Any, Protocol

from torch import nn


class Synchronizable(Protocol):
    """What the hooks need of an optimizer."""

    def synchronize(self) -> None: ...


def keep_current(model: nn.Module, optimizer: Synchronizable) -> None:
    """Synchronize before ``model.state_dict()`` and before a forward pass in evaluation mode."""
    model.register_state_dict_pre_hook(_BeforeSave(optimizer))
    model.register_forward_pre_hook(_BeforeForward(optimizer))


class _Hook:
    """Knows an optimizer as long as it lives. In a copy of the model it knows none."""

    def __init__(self, optimizer: Synchronizable | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()

    def synchronize(self) -> None:
        held = None if self._optimizer is None else self._optimizer()
        if held is not None:
            held.synchronize()


class _BeforeSave(_Hook):
    def __call__(self, *_: Any) -> None:
        self.synchronize()


class _BeforeForward(_Hook):
    def __call__(self, module: nn.Module, _: Any) -> None:
        if not module.training:
            self.synchronize()
