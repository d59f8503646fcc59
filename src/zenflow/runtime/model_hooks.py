"""Hooks on the user's model that keep what is saved and evaluated current."""

import weakref
from typing import Any, Protocol

from torch import nn


class Synchronizable(Protocol):
    """What the hooks need of an optimizer."""

    def synchronize(self) -> None: ...


def keep_current(model: nn.Module, optimizer: Synchronizable) -> None:
    """Synchronize before ``model.state_dict()`` and before a forward pass in evaluation mode."""
    reference = weakref.ref(optimizer)

    def before_save(*_: Any) -> None:
        held = reference()
        if held is not None:
            held.synchronize()

    def before_forward(module: nn.Module, _: Any) -> None:
        held = reference()
        if held is not None and not module.training:
            held.synchronize()

    model.register_state_dict_pre_hook(before_save)
    model.register_forward_pre_hook(before_forward)
