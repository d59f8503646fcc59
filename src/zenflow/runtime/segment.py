"""A segment at run time: its two sides of state, its slots, and its sweep in flight."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.core import preview
from zenflow.core.channels import ChannelMap, Handover
from zenflow.core.rules import SubStep, rebias_factor
from zenflow.kernels import selective
from zenflow.kernels.selective import DeviceSide, SelectedState, Share
from zenflow.runtime import device_ops
from zenflow.runtime.platform import Platform
from zenflow.runtime.slots import BufferPool, Captured, Slot
from zenflow.runtime.sweep import Refresh, Sweep


@dataclass(slots=True, eq=False)
class Segment:
    """Rows of one weight. Steps, selection and sub-steps belong to the weight; the rest is here.

    Attributes:
        key: names the segment in the storage.
        start, stop: its rows.
        is_whole: these are all rows of the weight.
        weight: the rows as a device view ``[R, C]`` or ``[R, C, K]``.
        channels: which channel lives where; None before the first gradient.
        hosted_index: the channels of the host side, on the device.
        side: the device side; None before the first gradient.
        gathered: the side holds the selected part of the gradient whose step comes next.
        captured: a gradient whose step has not been applied yet.
        waiting: slots since the last sweep, oldest first.
        sweep: in flight, to be published.
        adopted: version of the weight's selection that this segment uses.
        host_steps: updates that the host state has had ("accumulate" only counts windows).
        last: the sub-step that the host state ended with.
        extrapolated: the visible weights are ahead of the master by a lookahead.
        synchronous_until: up to this step, every step is swept and published before it ends.
        deferred_numel: elements of the deferred channels.
        shows_previews: gradients that wait are shown.
        factors_at: update count of the second moment that the previews' factors are of; 0: there are none.
        factors_room: host memory for them to cross the link.
    """

    key: int
    weight: Tensor
    start: int
    stop: int
    is_whole: bool
    channels: ChannelMap | None = None
    hosted_index: Tensor | None = None
    side: DeviceSide | None = None
    gathered: bool = False
    captured: Captured | None = None
    waiting: list[Slot] = field(default_factory=list)
    sweep: Sweep | None = None
    adopted: int = 0
    host_steps: int = 0
    last: SubStep | None = None
    extrapolated: bool = False
    synchronous_until: int = 0
    deferred_numel: int = 0
    shows_previews: bool = False
    factors_at: int = 0
    factors_room: Tensor | None = None

    def begin(self, platform: Platform, selected: Tensor) -> None:
        """Create both sides' state from the weight as it is, with zero moments."""
        num_channels = self.weight.shape[1]
        self._place(
            platform, ChannelMap.create(num_channels, selected, compact=not platform.link.shared)
        )
        if self.selected is not None:
            platform.device.run(_begin_selected, self.side)
        platform.storage.create(self.key, self.host_shape)
        state = platform.storage.fetch(self.key)
        state.master.copy_(self._deferred_weight(platform))
        platform.storage.store(self.key, state)
        self.watch(platform)

    @property
    def selected(self) -> SelectedState | None:
        """State of the selected channels; None if there are none."""
        return None if self.side is None else self.side.state

    def watch(self, platform: Platform) -> None:
        """Take the fingerprint of the weight as it now is."""
        assert self.side is not None
        platform.device.run(selective.fingerprint, self.weight, self.side.fingerprint)

    @property
    def host_shape(self) -> torch.Size:
        assert self.channels is not None
        return self._shape(self.channels.hosted.numel())

    @property
    def oldest(self) -> int | None:
        """Step of the oldest gradient that the visible weights lack."""
        if self.sweep is not None and self.sweep.slots:
            return self.sweep.slots[0].step
        return self.waiting[0].step if self.waiting else None

    def rows_of(self, whole: Tensor) -> Tensor:
        """This segment's rows of a tensor of the weight's shape."""
        return whole if self.is_whole else whole[self.start : self.stop]

    def share(self, platform: Platform, grad: Tensor, number: int = 0) -> Share | None:
        """What has to be gathered of this segment's rows of a gradient; None if nothing has.

        Args:
            number: of the gradient in a :class:`Look`.
        """
        side = self.side
        if side is None or side.selected_grad is None or self.channels is None:
            return None
        if side.selected_grad.dtype is not grad.dtype:
            room = platform.device.empty(side.selected_grad.shape, grad.dtype)
            side = platform.device_kernel.prepared(side._replace(selected_grad=room))
            self.side = side
        self.gathered = True
        return Share(side, grad, number)

    def send(self, platform: Platform, pool: BufferPool, grad: Tensor) -> Transfer:
        """Capture the deferred channels of a gradient (this segment's rows) across the link.

        Returns the copy under way.
        """
        device = platform.device
        staging = device.empty(self.host_shape, grad.dtype)
        device.run(device_ops.gather, grad, self.hosted_index, staging)
        buffer = pool.acquire(self.host_shape, grad.dtype)
        transfer = platform.link.to_host(staging, buffer, device.mark())
        self.captured = Captured(transfer.tensor, transfer.ticket, buffer)
        return transfer

    def refresh(self, platform: Platform) -> Refresh | None:
        """What a sweep has to do for previews, if it is time."""
        side, channels = self.side, self.channels
        assert side is not None and channels is not None
        if side.factors is None or not preview.refresh_is_due(self.host_steps, self.factors_at):
            return None
        self.factors_at = self.host_steps
        if channels.compact:
            if self.factors_room is None:
                self.factors_room = platform.storage.buffer(side.factors.shape, torch.float32)
            return Refresh(None, channels.hosted, side.factors, self.factors_room)
        places = channels.deferred_places()
        return Refresh(places, places, side.factors, None)

    def commit(self, step: int, substep: SubStep) -> None:
        """Let the captured gradient wait as a slot."""
        captured, self.captured, self.gathered = self.captured, None, False
        assert captured is not None
        grad, ticket, buffer = captured
        self.waiting.append(Slot(step, substep, grad, ticket, buffer))

    def publish(self, platform: Platform, weights: Tensor) -> None:
        """Write the deferred channels, which came across the link, into the weight."""
        platform.device.run(device_ops.scatter, self.weight, self.hosted_index, weights)
        self.watch(platform)

    def adopt(self, platform: Platform, chosen: Tensor, substep: SubStep) -> int:
        """Hand over channels so that ``chosen`` are selected; returns how many became selected.

        Both sides stand at the same step: nothing is waiting and nothing is in flight.

        Args:
            substep: the weight's last sub-step; its count is the selected side's.
        """
        assert self.channels is not None and not self.waiting and self.sweep is None
        handover = self.channels.handover_to(chosen)
        if handover is None:
            return 0
        assert self.selected is not None
        places = upload(platform, handover.places)
        state = platform.storage.fetch(self.key)
        to_device = torch.stack([t.index_select(1, handover.host_from) for t in state])
        to_host = self._take_selected(platform, places, handover)
        _rebias(to_host, substep, substep.step, self.host_steps)
        _rebias(to_device, substep, self.host_steps, substep.step)
        for tensor, values in zip(state, to_host, strict=True):
            tensor.index_copy_(1, handover.host_to, values)
        platform.storage.store(self.key, state)
        arrived = upload(platform, to_device)
        platform.device.run(device_ops.put_state, self.selected, places, arrived)
        if self.captured is not None:
            self._swap_captured(platform, self.captured, places, handover)
        else:
            self.gathered = False
        self._place(platform, self.channels.after(handover))
        platform.device.run(selective.write_selected, self.side)
        self.watch(platform)
        return handover.incoming.numel()

    def _swap_captured(
        self, platform: Platform, captured: Captured, places: Tensor, handover: Handover
    ) -> None:
        """A gradient captured under the old selection changes sides with its channels."""
        assert self.side is not None
        selected_grad = self.side.selected_grad
        captured.ticket.wait()
        incoming = captured.grad.index_select(1, handover.host_from)
        outgoing = platform.device.empty(incoming.shape, incoming.dtype)
        platform.device.run(device_ops.gather, selected_grad, places, outgoing)
        captured.grad.index_copy_(1, handover.host_to, download(platform, outgoing))
        arrived = upload(platform, incoming)
        platform.device.run(device_ops.scatter, selected_grad, places, arrived)

    def _take_selected(self, platform: Platform, places: Tensor, handover: Handover) -> Tensor:
        shape = (3, *self._shape(handover.places.numel()))
        taken = platform.device.empty(shape, torch.float32)
        platform.device.run(device_ops.take_state, self.selected, places, taken)
        return download(platform, taken)

    def reread(self, platform: Platform) -> None:
        """Take the weight as it now is for the master of both sides; moments stay."""
        assert self.channels is not None
        state = platform.storage.fetch(self.key)
        state.master.copy_(self._deferred_weight(platform))
        platform.storage.store(self.key, state)
        self.extrapolated = False
        self.look_anew(platform)
        if self.selected is not None:
            platform.device.run(_reread_selected, self.side)

    def look_anew(self, platform: Platform) -> None:
        """Take the fingerprint of the weight, whose memory may be other than it was."""
        assert self.channels is not None
        self._place(platform, self.channels)
        self.watch(platform)

    def assemble(self, platform: Platform) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments of all channels, in channel order, fp32 in host memory.

        The moments of deferred channels are brought to the weight's own step count by the caller.
        """
        assert self.channels is not None
        shape = self._shape(self.channels.num_channels)
        whole = [torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(3)]
        state = platform.storage.fetch(self.key)
        for target, source in zip(whole, state, strict=True):
            target.index_copy_(1, self.channels.hosted, source)
        platform.storage.store(self.key, state)
        if self.selected is not None:
            for target, source in zip(whole, self.selected, strict=True):
                target.index_copy_(1, self.channels.selected, download(platform, source))
        return whole[0], whole[1], whole[2]

    def restore(self, platform: Platform, whole: tuple[Tensor, Tensor, Tensor]) -> None:
        """The inverse of :meth:`assemble`, after :meth:`begin`."""
        assert self.channels is not None
        state = platform.storage.fetch(self.key)
        for target, source in zip(state, whole, strict=True):
            target.copy_(source.index_select(1, self.channels.hosted))
        platform.storage.store(self.key, state)
        if self.selected is not None:
            picked = torch.stack([t.index_select(1, self.channels.selected) for t in whole])
            places = upload(platform, torch.arange(self.channels.selected.numel(), device="cpu"))
            arrived = upload(platform, picked)
            platform.device.run(device_ops.put_state, self.selected, places, arrived)

    def _shape(self, num_channels: int) -> torch.Size:
        rows, _, *kernel = self.weight.shape
        return torch.Size((rows, num_channels, *kernel))

    def _place(self, platform: Platform, channels: ChannelMap) -> None:
        """Make the device side anew: other channels are selected, or the weight has other memory."""
        self.channels = channels
        selected, hosted = channels.selected, channels.hosted
        self.hosted_index = upload(platform, hosted) if channels.compact else None
        self.deferred_numel = self._shape(channels.num_deferred).numel()
        element_shape = self.weight.shape[2:]
        num_lanes = selective.lanes(self.weight).shape[1]
        lanes = channels.deferred_lanes(element_shape.numel(), num_lanes)
        before = self.side
        if before is None or before.fingerprint is None or before.fingerprint.numel() != num_lanes:
            fingerprint = platform.device.empty((num_lanes,), torch.int64)
        else:
            fingerprint = before.fingerprint
        side = DeviceSide(
            self.weight,
            fingerprint=fingerprint,
            deferred_lanes=upload(platform, lanes),
            factors=self._factors(platform),
        )
        if selected.numel():
            state, selected_grad = self._room_for_selected(platform, selected.numel())
            side = side._replace(
                channels=upload(platform, selected),
                state=state,
                selected_grad=selected_grad,
                is_selected=upload(platform, channels.is_selected(element_shape)),
            )
            if side.factors is not None:
                platform.device.run(selective.hide_selected, side)
        self.side = platform.device_kernel.prepared(side)

    def _factors(self, platform: Platform) -> Tensor | None:
        """The present ones of the previews, or zeros."""
        if not self.shows_previews or self.side is not None:
            return None if self.side is None else self.side.factors
        numel = len(self.weight) + self.weight[0].numel()
        factors = platform.device.empty((numel,), torch.float32)
        platform.device.run(selective.clear, factors)
        return factors

    def _room_for_selected(self, platform: Platform, num: int) -> tuple[SelectedState, Tensor]:
        """The present state and place for gradients, or new ones."""
        if self.side is not None and self.side.state is not None:
            assert self.side.selected_grad is not None
            return self.side.state, self.side.selected_grad
        device, shape = platform.device, self._shape(num)
        state = SelectedState(*(device.empty(shape, torch.float32) for _ in range(3)))
        return state, device.empty(shape, self.weight.dtype)

    def _deferred_weight(self, platform: Platform) -> Tensor:
        if self.hosted_index is None:
            return self.weight
        staging = platform.device.empty(self.host_shape, self.weight.dtype)
        platform.device.run(device_ops.gather, self.weight, self.hosted_index, staging)
        return download(platform, staging)


def upload(platform: Platform, tensor: Tensor) -> Tensor:
    """A host tensor on the device; waits. For what is small and rare."""
    device = platform.device
    target = None if platform.link.shared else device.empty(tensor.shape, tensor.dtype)
    return platform.link.to_device(tensor, target, device.mark()).wait()


def download(platform: Platform, tensor: Tensor) -> Tensor:
    """A device tensor on the host; waits. For what is small and rare."""
    shared = platform.link.shared
    target = None if shared else platform.storage.buffer(tensor.shape, tensor.dtype)
    return platform.link.to_host(tensor, target, platform.device.mark()).wait()


def _begin_selected(side: DeviceSide) -> None:
    _reread_selected(side)
    assert side.state is not None
    side.state.exp_avg.zero_()
    side.state.exp_avg_sq.zero_()


def _reread_selected(side: DeviceSide) -> None:
    """The masters of the selected channels from the weight as it now is."""
    assert side.state is not None and side.channels is not None
    side.state.master.copy_(side.weight.index_select(1, side.channels))


def _rebias(values: Tensor, substep: SubStep, from_step: int, to_step: int) -> None:
    """Scale both moments of ``values`` ``[3, R, n(, K)]`` to another side's step count."""
    if from_step == to_step:
        return
    values[1].mul_(rebias_factor(substep.beta1, from_step, to_step))
    values[2].mul_(rebias_factor(substep.beta2, from_step, to_step))
