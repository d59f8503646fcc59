"""A parameter that is never split: updated whole on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.core.rules import Coefficients, SubStep
from zenflow.kernels.selective import DeviceSide, SelectedState, Update
from zenflow.runtime import device_ops
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
        side: the parameter and its state; None before the first gradient.
        grad: absorbed, its step not applied yet.
        seen: the parameter's memory and version after the runtime's last write, to notice others'.
        restored: the state was loaded and the parameter not yet compared with it.
    """

    param: Tensor
    name: str
    steps: int = 0
    side: DeviceSide | None = None
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
        self._place(platform, SelectedState(master, *moments))
        device.run(_begin, weight, self.state)
        self.seen = identity(self.param)

    @property
    def state(self) -> SelectedState | None:
        """Of the whole parameter; None before the first gradient."""
        return None if self.side is None else self.side.state

    def _place(self, platform: Platform, state: SelectedState) -> None:
        """Make the side anew: the parameter may have other memory than it had."""
        weight = self.param.detach()
        if not self.has_master:
            state = state._replace(master=weight)
        self.side = platform.device_kernel.prepared(DeviceSide(weight, state=state))

    def reread(self, platform: Platform) -> None:
        """Take the parameter as it now is for the master."""
        assert self.state is not None
        self._place(platform, self.state)
        if self.has_master:
            platform.device.run(device_ops.copy, self.state.master, self.param.detach())
        self.seen = identity(self.param)

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
        self._place(platform, self.state)
        self.seen = identity(self.param)
        return False

    @property
    def num_selected(self) -> int:
        """All its channels, if it has any."""
        return self.param.shape[1] if self.param.dim() >= 2 else 0

    def commit(
        self, step: int, substep: SubStep, coefficients: Coefficients, updates: list[Update]
    ) -> None:
        """Add the absorbed gradient's update to ``updates``."""
        grad, self.grad = self.grad, None
        assert self.side is not None and grad is not None
        self.steps = substep.step
        updates.append(Update(self.side, grad, coefficients))


def _count_different(master: Tensor, weight: Tensor, count: Tensor) -> None:
    count.copy_((master.to(weight.dtype) != weight).sum())


def _begin(weight: Tensor, state: SelectedState) -> None:
    if not state.master.is_set_to(weight):  # a write would spoil a backward pass that goes on
        state.master.copy_(weight)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
