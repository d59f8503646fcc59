"""A split parameter: its segments, its selection, its count of steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zenflow.core.channels import channel_view
from zenflow.core.rules import Coefficients, SubStep
from zenflow.kernels.selective import DeviceSide, Update
from zenflow.runtime import device_ops
from zenflow.runtime.platform import Platform
from zenflow.runtime.resident import NOT_SEEN, check_place, identity
from zenflow.runtime.segment import Segment
from zenflow.runtime.selection import Selection, score
from zenflow.runtime.selection_writer import SelectionWriter


@dataclass(slots=True, eq=False)
class Weight:
    """A split parameter.

    Attributes:
        view: the parameter as ``[R, C]`` or ``[R, C, K]``.
        index: its number among the split parameters.
        num_selected: k, channels selected at a time.
        seen: the parameter's memory and version after the runtime's last write, to notice others'.
        substep: of its last gradient.
        adopted: version of the selection that all its segments use.
        selection: None before the first gradient, and where no channel is selected.
        inherited: AdamW state loaded from elsewhere, to begin with at the first gradient.
        restored_checksum: of the parameter that a loaded state belongs to, until it is compared.
    """

    param: Tensor
    name: str
    view: Tensor
    index: int
    num_selected: int
    seen: tuple[int, int] = NOT_SEEN
    segments: list[Segment] = field(default_factory=list)
    steps: int = 0
    substep: SubStep | None = None
    adopted: int = 0
    selection: Selection | None = None
    inherited: Mapping[str, Any] | None = None
    restored_checksum: int | None = None

    def begin(
        self,
        platform: Platform,
        grad: Tensor,
        interval: int | str,
        step: int,
        writer: SelectionWriter,
    ) -> None:
        """Create the state, with the channels that this first gradient selects."""
        self.follow()
        chosen = torch.empty(0, dtype=torch.int64, device="cpu")
        if self.num_selected:
            scored, energies = score(platform, grad, self.num_selected, logged=writer.is_on)
            chosen = platform.device.read(scored)
            self.selection = Selection.begin(chosen, interval, step, self.index)
            if energies is not None:
                writer.begun(self.name, step, platform.device.read(energies), chosen)
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
    def sides(self) -> list[DeviceSide]:
        """Of its segments, once it has begun."""
        return [side for segment in self.segments if (side := segment.side) is not None]

    def changed_outside(self, platform: Platform, *, suspicious: bool) -> bool:
        """Whether somebody else has written the parameter.

        Args:
            suspicious: fingerprints have to be looked at, too.
        """
        if not self.begun or not (self._is_other() or (suspicious and self._lost_print(platform))):
            return False
        expected, self.restored_checksum = self.restored_checksum, None
        if expected is not None and expected == self.checksum(platform):
            self.follow()
            self.seen = identity(self.param)
            for segment in self.segments:
                segment.look_anew(platform)
            return False
        return True

    def _is_other(self) -> bool:
        return self.seen != identity(self.param)

    def _lost_print(self, platform: Platform) -> bool:
        sides = self.sides
        out = platform.device.empty((len(sides),), torch.int64)
        platform.device.run(device_ops.num_changed, sides, out)
        return bool(platform.device.read(out).any())

    def follow(self) -> None:
        """Look at the parameter's present memory, which may be other than it was.

        Raises:
            ValueError: if it is of another size or on another device now.
        """
        check_place(self.param, self.view, self.name)
        self.view = channel_view(self.param.detach())
        for segment in self.segments:
            segment.weight = self.view[segment.start : segment.stop]

    def reread(self, platform: Platform) -> None:
        """Take the parameter, which is followed, as it now is for the master of both sides.

        Nothing is in flight.
        """
        for segment in self.segments:
            segment.reread(platform)
        self.seen = identity(self.param)

    def commit(
        self, step: int, substep: SubStep, coefficients: Coefficients, updates: list[Update]
    ) -> None:
        """Let the absorbed gradient wait; add the selected channels' updates to ``updates``."""
        self.steps = substep.step
        self.substep = substep
        for segment in self.segments:
            segment.commit(step, substep)
            side = segment.side
            if side is not None and side.selected_grad is not None:
                updates.append(Update(side, side.selected_grad, coefficients))

    def forget(self, step: int) -> None:
        """Undo what the gradient of a step that is not applied has begun."""
        if self.selection is not None:
            self.selection.forget(step)
        if self.steps == 0:
            self.selection = None
            for segment in self.segments:
                segment.channels = None
