"""Channels: how a parameter is seen, and on which side each channel of a segment lives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.core.selection import num_selected

TINY_NUMEL = 64
"""A parameter with fewer elements is not worth splitting."""


def is_split(param: Tensor, topk_ratio: float) -> bool:
    """Whether some of the parameter's channels are deferred; otherwise it is resident."""
    if param.dim() < 2 or param.numel() < TINY_NUMEL:
        return False
    return num_selected(param.shape[1], topk_ratio) < param.shape[1] and _is_viewable(param)


def channel_view(tensor: Tensor) -> Tensor:
    """A weight as ``[R, C]``, or ``[R, C, K]`` with all dimensions behind the second flattened."""
    return tensor if tensor.dim() == 2 else tensor.flatten(2)


def _is_viewable(param: Tensor) -> bool:
    if param.dim() == 2:
        return True
    view = channel_view(param.detach())
    return view.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Handover:
    """The channels that change sides, and where their state lies on each side; int64 ``[n]`` each.

    Attributes:
        incoming: channels that become selected.
        outgoing: channels that become deferred; ``outgoing[i]`` makes room for ``incoming[i]``.
        places: positions in the selected state that both pass through.
        host_from: positions in the host state where ``incoming`` is read.
        host_to: positions in the host state where ``outgoing`` is written.
    """

    incoming: Tensor
    outgoing: Tensor
    places: Tensor
    host_from: Tensor
    host_to: Tensor


@dataclass(frozen=True, slots=True)
class ChannelMap:
    """Where each channel of a segment lives.

    Attributes:
        num_channels: C.
        selected: int64 ``[k]``, the channel at each position of the selected state.
        hosted: int64 ``[W]``, the channel at each position of the host state. Compact (a link
            between): the C - k deferred ones. Otherwise (shared memory): all C, in order, so that a
            gradient is a slot as it is; what the host computes for selected channels is never
            published.
        compact: which of the two.
    """

    num_channels: int
    selected: Tensor
    hosted: Tensor
    compact: bool

    @classmethod
    def create(cls, num_channels: int, selected: Tensor, *, compact: bool) -> "ChannelMap":
        hosted = torch.arange(num_channels, device="cpu")
        if compact:
            hosted = hosted[~torch.isin(hosted, selected)]
        return cls(num_channels, selected, hosted, compact)

    @property
    def num_deferred(self) -> int:
        return self.num_channels - self.selected.numel()

    def deferred_places(self) -> Tensor:
        """Positions in the host state of the deferred channels, in ascending channel order."""
        places = torch.empty(self.num_channels, dtype=torch.int64, device="cpu")
        places[self.hosted] = torch.arange(self.hosted.numel(), device="cpu")
        channels = torch.arange(self.num_channels, device="cpu")
        return places[channels[~torch.isin(channels, self.selected)]]

    def is_selected(self, element_shape: torch.Size) -> Tensor:
        """Which of a row's elements are of selected channels, bool ``[C, *element_shape]``."""
        selected = torch.zeros(self.num_channels, *element_shape, dtype=torch.bool, device="cpu")
        selected[self.selected] = True
        return selected

    def deferred_lanes(self, elements_per_channel: int, num_lanes: int) -> Tensor:
        """Which of a row's equal lanes hold nothing but deferred channels; bool ``[num_lanes]``."""
        selected = self.is_selected(torch.Size([elements_per_channel]))
        return ~selected.view(num_lanes, -1).any(1)

    def handover_to(self, chosen: Tensor) -> Handover | None:
        """What moves when ``chosen`` (as many channels as are selected now) replaces the
        selection."""
        incoming = chosen[~torch.isin(chosen, self.selected)]
        if incoming.numel() == 0:
            return None
        places = (~torch.isin(self.selected, chosen)).nonzero().squeeze(1)
        outgoing = self.selected[places]
        if not self.compact:
            return Handover(incoming, outgoing, places, incoming, outgoing)
        position = torch.empty(self.num_channels, dtype=torch.int64, device="cpu")
        position[self.hosted] = torch.arange(self.hosted.numel(), device="cpu")
        freed = position[incoming]
        return Handover(incoming, outgoing, places, freed, freed)

    def after(self, handover: Handover) -> "ChannelMap":
        selected = self.selected.clone()
        selected[handover.places] = handover.incoming
        hosted = self.hosted
        if self.compact:
            hosted = hosted.clone()
            hosted[handover.host_to] = handover.outgoing
        return ChannelMap(self.num_channels, selected, hosted, self.compact)
