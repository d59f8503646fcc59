"""A segment at run time: its two sides of state, its slots, and its sweep in flight."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.core.channels import ChannelMap, Handover
from zenflow.core.rules import SubStep, rebias_factor
from zenflow.runtime import device_ops
from zenflow.runtime.device_ops import SelectedState, Watch
from zenflow.runtime.platform import Platform
from zenflow.runtime.slots import BufferPool, Captured, Slot
from zenflow.runtime.sweep import Sweep


@dataclass(slots=True, eq=False)
class Segment:
    """Rows of one weight. Steps, selection and sub-steps belong to the weight; the rest is here.

    Attributes:
        key: names the segment in the storage.
        weight: the rows as a device view ``[R, C]`` or ``[R, C, K]``.
        channels: which channel lives where; None before the first gradient.
        selected_index, hosted_index: the same two lists on the device.
        selected: state of the selected channels; None if there are none.
        captured: a gradient whose step has not been applied yet.
        waiting: slots since the last sweep, oldest first.
        sweep: in flight, to be published.
        adopted: version of the weight's selection that this segment uses.
        host_steps: updates that the host state has had ("accumulate" only counts windows).
        last: the sub-step that the host state ended with.
        extrapolated: the visible weights are ahead of the master by a lookahead.
        fingerprint: of the weight as the runtime last published it; ``deferred_lanes`` says which of
            it are of deferred channels alone. Shows writes through ``param.data``, which no version
            counts.
        synchronous_until: up to this step, every step is swept and published before it ends.
    """

    key: int
    weight: Tensor
    start: int
    stop: int
    channels: ChannelMap | None = None
    selected_index: Tensor | None = None
    hosted_index: Tensor | None = None
    selected: SelectedState | None = None
    captured: Captured | None = None
    waiting: list[Slot] = field(default_factory=list)
    sweep: Sweep | None = None
    adopted: int = 0
    host_steps: int = 0
    last: SubStep | None = None
    extrapolated: bool = False
    fingerprint: Tensor | None = None
    deferred_lanes: Tensor | None = None
    synchronous_until: int = 0

    def begin(self, platform: Platform, selected: Tensor) -> None:
        """Create both sides' state from the weight as it is, with zero moments."""
        num_channels = self.weight.shape[1]
        self._place(
            platform, ChannelMap.create(num_channels, selected, compact=not platform.link.shared)
        )
        if selected.numel():
            shape = self._shape(selected.numel())
            self.selected = SelectedState(
                *(platform.device.empty(shape, torch.float32) for _ in range(3))
            )
            platform.device.run(_begin_selected, self.weight, self.selected_index, self.selected)
        platform.storage.create(self.key, self.host_shape)
        state = platform.storage.fetch(self.key)
        state.master.copy_(self._deferred_weight(platform))
        platform.storage.store(self.key, state)
        self.watch(platform)

    def watch(self, platform: Platform) -> None:
        """Take the fingerprint of the weight as it now is."""
        if self.fingerprint is None:
            num_lanes = device_ops.lanes(self.weight).shape[1]
            self.fingerprint = platform.device.empty((num_lanes,), torch.int64)
        platform.device.run(device_ops.fingerprint, self.weight, self.fingerprint)

    def as_watched(self) -> Watch | None:
        """What shows a write to the deferred channels; None before the first gradient."""
        if self.channels is None or self.fingerprint is None or self.deferred_lanes is None:
            return None
        return Watch(self.weight, self.fingerprint, self.deferred_lanes)

    @property
    def host_shape(self) -> torch.Size:
        assert self.channels is not None
        return self._shape(self.channels.hosted.numel())

    @property
    def deferred_numel(self) -> int:
        assert self.channels is not None
        return self._shape(self.channels.num_deferred).numel()

    @property
    def oldest(self) -> int | None:
        """Step of the oldest gradient that the visible weights lack."""
        if self.sweep is not None and self.sweep.slots:
            return self.sweep.slots[0].step
        return self.waiting[0].step if self.waiting else None

    def capture(self, platform: Platform, pool: BufferPool, grad: Tensor) -> Transfer:
        """Take a gradient: deferred channels to the host, selected ones aside.

        Returns the copy under way.

        Args:
            grad: this segment's rows; where memory is shared, owned by the runtime and contiguous.
        """
        device = platform.device
        selected_grad = None
        if self.selected is not None:
            selected_grad = device.empty(self.selected.master.shape, grad.dtype)
            device.run(device_ops.gather, grad, self.selected_index, selected_grad)
        if platform.link.shared:
            transfer, buffer = platform.link.to_host(grad, None, device.mark()), None
        else:
            staging = device.empty(self.host_shape, grad.dtype)
            device.run(device_ops.gather, grad, self.hosted_index, staging)
            buffer = pool.acquire(self.host_shape, grad.dtype)
            transfer = platform.link.to_host(staging, buffer, device.mark())
        self.captured = Captured(transfer.tensor, transfer.ticket, buffer, selected_grad)
        return transfer

    def commit(self, step: int, substep: SubStep) -> Tensor | None:
        """Let the captured gradient wait as a slot; returns the selected channels' part."""
        captured, self.captured = self.captured, None
        assert captured is not None
        grad, ticket, buffer, selected_grad = captured
        self.waiting.append(Slot(step, substep, grad, ticket, buffer))
        return selected_grad

    def publish(self, platform: Platform, weights: Tensor) -> None:
        """Write the deferred channels of ``weights`` (of the host's shape) into the weight."""
        if platform.link.shared:
            master = None if self.selected is None else self.selected.master
            platform.device.run(
                device_ops.publish_all, self.weight, weights, self.selected_index, master
            )
        else:
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
        self._place(platform, self.channels.after(handover))
        platform.device.run(
            device_ops.write_selected, self.weight, self.selected_index, self.selected.master
        )
        self.watch(platform)
        return handover.incoming.numel()

    def _swap_captured(
        self, platform: Platform, captured: Captured, places: Tensor, handover: Handover
    ) -> None:
        """A gradient captured under the old selection changes sides with its channels."""
        assert captured.selected_grad is not None
        captured.ticket.wait()
        incoming = captured.grad.index_select(1, handover.host_from)
        outgoing = platform.device.empty(incoming.shape, incoming.dtype)
        platform.device.run(device_ops.gather, captured.selected_grad, places, outgoing)
        captured.grad.index_copy_(1, handover.host_to, download(platform, outgoing))
        arrived = upload(platform, incoming)
        platform.device.run(device_ops.scatter, captured.selected_grad, places, arrived)

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
        self.fingerprint = None  # other memory may have other lanes
        self._place(platform, self.channels)
        self.watch(platform)
        if self.selected is not None:
            index, master = self.selected_index, self.selected.master
            platform.device.run(device_ops.gather, self.weight, index, master)

    def assemble(self, platform: Platform) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments of all channels, in channel order, fp32 in host memory.

        The moments of deferred channels are brought to the weight's own step count by the caller.
        """
        assert self.channels is not None
        whole = [torch.empty(self._shape(self.channels.num_channels)) for _ in range(3)]
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
            places = upload(platform, torch.arange(self.channels.selected.numel()))
            arrived = upload(platform, picked)
            platform.device.run(device_ops.put_state, self.selected, places, arrived)

    def _shape(self, num_channels: int) -> torch.Size:
        rows, _, *kernel = self.weight.shape
        return torch.Size((rows, num_channels, *kernel))

    def _place(self, platform: Platform, channels: ChannelMap) -> None:
        self.channels = channels
        selected, hosted = channels.selected, channels.hosted
        self.selected_index = upload(platform, selected) if selected.numel() else None
        self.hosted_index = upload(platform, hosted) if channels.compact else None
        rows, num_channels, *_ = self.weight.shape
        num_lanes = device_ops.lanes(self.weight).shape[1]
        lanes = channels.deferred_lanes(self.weight.numel() // (rows * num_channels), num_lanes)
        self.deferred_lanes = upload(platform, lanes)

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


def _begin_selected(weight: Tensor, index: Tensor, state: SelectedState) -> None:
    state.master.copy_(weight.index_select(1, index))
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()


def _rebias(values: Tensor, substep: SubStep, from_step: int, to_step: int) -> None:
    """Scale both moments of ``values`` ``[3, R, n(, K)]`` to another side's step count."""
    if from_step == to_step:
        return
    values[1].mul_(rebias_factor(substep.beta1, from_step, to_step))
    values[2].mul_(rebias_factor(substep.beta2, from_step, to_step))
