"""A parameter that is never split: updated whole on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.core.rules import SubStep
from zenflow.runtime import device_ops
from zenflow.runtime.device_ops import DeviceUpdate, SelectedState
from zenflow.runtime.platform import Platform

NOT_SEEN = (0, -1)
"""No parameter's identity."""


def identity(param: Tensor) -> tuple[int, int]:
    """Changes when a parameter is written in place or given other memory.

    A write through ``param.data`` does not count its version; fingerprints show it.
    """
    return param.data_ptr(), param._version


def check_place(param: Tensor, known: Tensor, name: str) -> None:
    """Refuse a parameter that is of another size or on another device than what is ``known``."""
    if param.device != known.device or param.numel() != known.numel():
        raise ValueError(
            f"{name} is now {tuple(param.shape)} on {param.device}, and the optimizer's state was "
            f"made for {tuple(known.shape)} on {known.device}; build the optimizer after moving or "
            "resizing the model"
        )


@dataclass(slots=True, eq=False)
class Resident:
    """A parameter updated whole on the device. An fp32 parameter is its own master.

    Attributes:
        grad: absorbed, its step not applied yet.
        seen: the parameter's memory and version after the runtime's last write, to notice others'.
        restored: the state was loaded and the parameter not yet compared with it.
    """

    param: Tensor
    name: str
    steps: int = 0
    state: SelectedState | None = None
    grad: Tensor | None = None
    seen: tuple[int, int] = NOT_SEEN
    restored: bool = False

    @property
    def has_master(self) -> bool:
        return self.param.dtype != torch.float32

    def begin(self, platform: Platform) -> None:
        weight = self.param.detach()
        device = platform.device
        master = device.empty(weight.shape, torch.float32) if self.has_master else weight
        moments = [device.empty(weight.shape, torch.float32) for _ in range(2)]
        self.state = SelectedState(master, *moments)
        device.run(_begin, weight, self.state)
        self.seen = identity(self.param)

    def reread(self, platform: Platform) -> None:
        """Take the parameter as it now is for the master."""
        assert self.state is not None
        if self.has_master:
            platform.device.run(device_ops.copy, self.state.master, self.param.detach())
        else:
            self.state = self.state._replace(master=self.param.detach())
        self.seen = identity(self.param)

    @property
    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """The master, and the weight that is this master, rounded; nothing if it is its own."""
        if self.state is None or not self.has_master or self.restored:
            return []
        return [(self.state.master, self.param.detach())]

    def changed_outside(self, platform: Platform, *, suspicious: bool) -> bool:
        """Whether somebody else has written the parameter.

        Args:
            suspicious: its values have to be looked at, too.
        """
        if self.state is None:
            return False
        is_other = self.seen != identity(self.param)
        if not is_other and not (suspicious and self.has_master):
            return False
        if is_other and not self.restored:
            return True
        self.restored = False
        count = platform.device.empty((), torch.int64)
        platform.device.run(_count_different, self.state.master, self.param.detach(), count)
        if platform.device.read(count).item():
            return True
        self.seen = identity(self.param)
        return False

    @property
    def num_selected(self) -> int:
        """All its channels, if it has any."""
        return self.param.shape[1] if self.param.dim() >= 2 else 0

    def updates(self, hyper: SubStep, step: int) -> list[DeviceUpdate]:
        """Count the absorbed gradient; returns its selective update."""
        grad, self.grad = self.grad, None
        assert self.state is not None and grad is not None
        self.steps += 1
        coefficients = hyper._replace(step=self.steps).coefficients()
        return [DeviceUpdate(self.param.detach(), None, self.state, grad, coefficients)]


def _count_different(master: Tensor, weight: Tensor, count: Tensor) -> None:
    count.copy_((master.to(weight.dtype) != weight).sum())


def _begin(weight: Tensor, state: SelectedState) -> None:
    if state.master is not weight:
        state.master.copy_(weight)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
