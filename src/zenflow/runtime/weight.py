"""What the runtime knows of one parameter: a resident, or a weight split into segments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.core.channels import channel_view
from zenflow.core.rules import SubStep
from zenflow.core.selection import AUTO_INTERVAL_MIN, next_interval
from zenflow.runtime import device_ops
from zenflow.runtime.device_ops import DeviceUpdate, SelectedState, Watch
from zenflow.runtime.platform import Platform
from zenflow.runtime.segment import Segment


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
    seen: tuple[int, int] = (0, 0)
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


@dataclass(slots=True, eq=False)
class Selection:
    """A weight's chosen channels over time. Segments adopt a version each at a time of its own.

    Attributes:
        chosen: the latest choice, int64 ``[k]`` ascending.
        version: counts the choices.
        interval: steps between two scorings; adapts if ``auto``.
        due: the step from which the next gradient is scored.
        pending: choices on their way from the device, each with the step that it was made at.
    """

    chosen: Tensor
    interval: int
    auto: bool
    due: int
    version: int = 0
    pending: list[tuple[int, Transfer]] = field(default_factory=list)

    @classmethod
    def begin(cls, chosen: Tensor, interval: int | str, step: int, index: int) -> "Selection":
        """The first choice, made at ``step``; weights take turns by their ``index``."""
        auto = interval == "auto"
        first = AUTO_INTERVAL_MIN if isinstance(interval, str) else interval
        return cls(chosen, first, auto, step + first - index % first)

    def score(self, platform: Platform, grad: Tensor, step: int) -> None:
        """Choose anew by this gradient; the choice arrives in a later step."""
        num = self.chosen.numel()
        chosen = platform.device.empty((num,), torch.int64)
        platform.device.run(device_ops.score, grad, platform.reduce, chosen)
        target = None if platform.link.shared else platform.storage.buffer((num,), torch.int64)
        self.pending.append((step, platform.link.to_host(chosen, target, platform.device.mark())))
        self.due = step + self.interval

    def forget(self, step: int) -> None:
        """Drop a choice made at a step that is not applied; the next gradient is scored instead."""
        if self.pending and self.pending[-1][0] == step:
            self.pending.pop()
            self.due = step

    def arrive(self, step: int) -> None:
        """Take the choice of an earlier step, if there is one."""
        if not self.pending or self.pending[0][0] >= step:
            return
        scored, transfer = self.pending.pop(0)
        chosen = transfer.wait()
        if self.auto:
            changed = (~torch.isin(chosen, self.chosen)).sum().item() / chosen.numel()
            self.interval = next_interval(self.interval, changed)
            self.due = scored + self.interval
        self.chosen = chosen
        self.version += 1


@dataclass(slots=True, eq=False)
class Weight:
    """A split parameter.

    Attributes:
        view: the parameter as ``[R, C]`` or ``[R, C, K]``.
        index: its number among the split parameters.
        num_selected: k, channels selected at a time.
        seen: the parameter's memory and version after the runtime's last write, to notice others'.
        substep: of its last gradient.
        selection: None before the first gradient, and where no channel is selected.
        inherited: AdamW state loaded from elsewhere, to begin with at the first gradient.
        restored_checksum: of the parameter that a loaded state belongs to, until it is compared.
    """

    param: Tensor
    name: str
    view: Tensor
    index: int
    num_selected: int
    seen: tuple[int, int] = (0, 0)
    segments: list[Segment] = field(default_factory=list)
    steps: int = 0
    substep: SubStep | None = None
    selection: Selection | None = None
    inherited: Mapping[str, Any] | None = None
    restored_checksum: int | None = None

    def begin(self, platform: Platform, grad: Tensor, interval: int | str, step: int) -> None:
        """Create the state, with the channels that this first gradient selects."""
        chosen = torch.empty(0, dtype=torch.int64)
        if self.num_selected:
            scored = platform.device.empty((self.num_selected,), torch.int64)
            platform.device.run(device_ops.score, grad, platform.reduce, scored)
            chosen = platform.device.read(scored)
            self.selection = Selection.begin(chosen, interval, step, self.index)
        for segment in self.segments:
            segment.begin(platform, chosen)
        self.seen = identity(self.param)
        if self.inherited is not None:
            self.inherit(platform, self.inherited)
            self.inherited = None
            for segment in self.segments:
                segment.host_steps = self.steps

    def inherit(self, platform: Platform, state: Mapping[str, Any]) -> None:
        """Take over a state in AdamW's layout, after the segments have begun.

        Without a ``"master"`` the weight itself stays the master.
        """
        self.steps = int(state["step"])
        names = ("master", "exp_avg", "exp_avg_sq")
        tensors = [state.get(name, self.param.detach()) for name in names]
        views = [channel_view(t.to("cpu", torch.float32)) for t in tensors]
        for segment in self.segments:
            master, exp_avg, exp_avg_sq = (view[segment.start : segment.stop] for view in views)
            segment.restore(platform, (master, exp_avg, exp_avg_sq))

    @property
    def begun(self) -> bool:
        return self.segments[0].channels is not None

    def checksum(self, platform: Platform) -> int:
        """Of the parameter as it now is."""
        out = platform.device.empty((), torch.int64)
        platform.device.run(device_ops.checksum, self.param.detach(), out)
        return int(platform.device.read(out).item())

    @property
    def watches(self) -> list[Watch]:
        """What shows a write to deferred channels that changed no version."""
        return [watch for s in self.segments if (watch := s.as_watched()) is not None]

    def changed_outside(self, platform: Platform, *, suspicious: bool) -> bool:
        """Whether somebody else has written the parameter.

        Args:
            suspicious: fingerprints have to be looked at, too.
        """
        if not self.begun or not (self._is_other() or (suspicious and self._lost_print(platform))):
            return False
        expected, self.restored_checksum = self.restored_checksum, None
        if expected is not None and expected == self.checksum(platform):
            self.seen = identity(self.param)
            for segment in self.segments:
                segment.watch(platform)
            return False
        return True

    def _is_other(self) -> bool:
        return self.seen != identity(self.param)

    def _lost_print(self, platform: Platform) -> bool:
        watches = self.watches
        out = platform.device.empty((len(watches),), torch.int64)
        platform.device.run(device_ops.num_changed, watches, out)
        return bool(platform.device.read(out).any())

    def reread(self, platform: Platform) -> None:
        """Take the parameter as it now is for the master of both sides. Nothing is in flight."""
        self.view = channel_view(self.param.detach())
        for segment in self.segments:
            segment.weight = self.view[segment.start : segment.stop]
            segment.reread(platform)
        self.seen = identity(self.param)

    def updates(self, hyper: SubStep, step: int) -> list[DeviceUpdate]:
        """Count the absorbed gradient, let it wait; returns the selected channels' updates."""
        self.steps += 1
        self.substep = hyper._replace(step=self.steps)
        coefficients = self.substep.coefficients()
        updates = []
        for segment in self.segments:
            grad = segment.commit(step, self.substep)
            if segment.selected is not None and grad is not None:
                updates.append(
                    DeviceUpdate(
                        segment.weight,
                        segment.selected_index,
                        segment.selected,
                        grad,
                        coefficients,
                    )
                )
        return updates

    def forget(self, step: int) -> None:
        """Undo what the gradient of a step that is not applied has begun."""
        if self.selection is not None:
            self.selection.forget(step)
        if self.steps == 0:
            self.selection = None
            for segment in self.segments:
                segment.channels = None


def identity(param: Tensor) -> tuple[int, int]:
    """Changes when a parameter is written in place or given other memory.

    A write through ``param.data`` does not count its version; fingerprints show it.
    """
    return param.data_ptr(), param._version


def _count_different(master: Tensor, weight: Tensor, count: Tensor) -> None:
    count.copy_((master.to(weight.dtype) != weight).sum())


def _begin(weight: Tensor, state: SelectedState) -> None:
    if state.master is not weight:
        state.master.copy_(weight)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
