"""How much memory a model takes, on the host and on the device: numbers only."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zenflow.core.segments import RowBlock, plan_segments
from zenflow.core.selection import ENERGY_BLOCK_NUMEL

STATE_BYTES = 12
"""fp32 master and two moments of one element."""


class HostNeed(NamedTuple):
    """Bytes of host memory, by what they hold."""

    state: int
    slots: int
    staging: int

    @property
    def total(self) -> int:
        return self.state + self.slots + self.staging


def host_need(deferred: Iterable[tuple[int, int]], update_interval: int) -> HostNeed:
    """Host memory for weights given as (elements held by the host, bytes of one weight element).

    Staggered windows hold between 1 and S gradients of a segment, (S + 1) / 2 on average; one in S
    segments has new weights in staging.
    """
    state = slots = staging = 0
    for numel, itemsize in deferred:
        state += numel * STATE_BYTES
        slots += numel * itemsize * (update_interval + 1) // 2
        staging += numel * itemsize // update_interval
    return HostNeed(state, slots, staging)


class Split(NamedTuple):
    """A split weight ``[rows, channels, kernel]``; ``selected`` of its channels are on the device."""

    rows: int
    channels: int
    kernel: int
    selected: int

    @property
    def numel(self) -> int:
        return self.rows * self.channels * self.kernel

    @property
    def selected_numel(self) -> int:
        return self.rows * self.selected * self.kernel


class DeviceNeed(NamedTuple):
    """Bytes of device memory beside activations, by what they hold.

    The first four are there all the time. Of the others, :attr:`peak` adds those that meet.
    """

    weights: int
    state: int
    indices: int
    factors: int
    gradients: int
    gathered: int
    selected: int
    update: int
    staging: int
    scoring: int
    preview: int

    @property
    def peak(self) -> int:
        kept = self.weights + self.state + self.indices + self.factors
        captured = self.gradients + self.gathered + self.selected
        return kept + captured + max(self.update, self.staging, self.scoring, self.preview)


def device_need(
    split: Sequence[Split],
    resident_numels: Sequence[int],
    itemsize: int,
    update_interval: int,
    *,
    streaming_bytes: int | None = None,
) -> DeviceNeed:
    """Device memory of one step, for one table of weights across a link.

    Each field is a row of the table "Device bytes" in docs/design.md.

    Args:
        itemsize: bytes of one weight or gradient element.
        update_interval: S; sweeps of about ``1/S`` of the segments are in flight together.
        streaming_bytes: how much gathered gradient a streaming backward pass leaves on the device; None
            if gradients are captured in ``step()`` and shown by previews.
    """
    selected = sum(weight.selected_numel for weight in split)
    deferred = sum(weight.numel for weight in split) - selected
    resident = sum(resident_numels)
    own_master = 0 if itemsize == 4 else 4
    largest = max((weight.numel for weight in split), default=0)
    # Each gradient goes as soon as it is gathered from, so gathered ones take the place of gradients.
    gathered, gradients = largest * itemsize, (deferred + selected + resident) * itemsize
    if streaming_bytes is not None:
        gathered = min(deferred * itemsize, streaming_bytes + largest * itemsize)
        gradients = (largest + resident) * itemsize
    blocks, factors = _blocks(split), 0
    largest_block = max((block.numel for block in blocks), default=0)
    if streaming_bytes is None:
        columns = [split[b.weight].channels * split[b.weight].kernel for b in blocks]
        factors = sum(4 * (b.numel // of + of) for b, of in zip(blocks, columns, strict=True))
    return DeviceNeed(
        weights=(deferred + selected + resident) * itemsize,
        state=STATE_BYTES * selected + (8 + own_master) * resident,
        indices=_index_bytes(split, itemsize),
        factors=factors,
        gradients=gradients,
        gathered=gathered,
        selected=selected * itemsize,
        update=_UPDATE_BYTES * (selected + resident),
        staging=-(-deferred * itemsize // update_interval) + largest_block * itemsize,
        scoring=2 * 4 * min(largest, ENERGY_BLOCK_NUMEL),
        preview=4 * largest_block if streaming_bytes is None else 0,
    )


_UPDATE_BYTES = 16
"""fp32 gradient, its square, denominator and update of one element, while the update runs."""


def _blocks(split: Sequence[Split]) -> list[RowBlock]:
    return plan_segments([(w.rows, w.channels * w.kernel) for w in split])


def _index_bytes(split: Sequence[Split], itemsize: int) -> int:
    """For each segment: an int64 for each channel; for each lane a fingerprint and whether it counts."""
    blocks = _blocks(split)
    lanes = [max(1, w.channels * w.kernel * itemsize // 8) for w in split]
    return sum(8 * split[b.weight].channels + 9 * lanes[b.weight] for b in blocks)
