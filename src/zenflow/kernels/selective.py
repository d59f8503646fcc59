"""The selective path in plain torch: what ``step()`` does to whole tensors on the device.

Functions write into tensors that they are given and take batches, because a model has hundreds of
tensors. They run on every device and are the oracle of the native kernel (``native.selective``).
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zenflow.core import preview as previews
from zenflow.core.rules import Coefficients
from zenflow.kernels.reference import adamw_


class SelectedState(NamedTuple):
    """fp32 state on the device: of a segment's selected channels, or of a whole resident
    parameter."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class DeviceSide(NamedTuple):
    """A segment's device side, or a resident parameter, which is a side without channels.

    Made anew when one of its tensors becomes another, which is rare.

    Attributes:
        weight: the rows ``[R, C]`` or ``[R, C, K]``; a resident parameter whole.
        channels: the selected ones, int64 ``[k]``; None: all of a resident parameter, or none.
        state: of those; None if there are none.
        selected_grad: room for their part of a gradient, ``[R, k(, K)]``.
        is_selected: bool ``[C]`` or ``[C, K]``, contiguous; None if no channel is.
        fingerprint: of the weight as the runtime last left it, see :func:`fingerprint`.
        deferred_lanes: which of its lanes hold deferred channels alone, bool.
        factors: fp32 ``[R + C(* K)]``, whose products of a row's and a column's are about ``1 / sqrt(v)``,
            see :mod:`zenflow.core.preview`; None without previews.
        record: what a kernel keeps of all this for itself; empty if it leaves this side to torch.
    """

    weight: Tensor
    channels: Tensor | None = None
    state: SelectedState | None = None
    selected_grad: Tensor | None = None
    is_selected: Tensor | None = None
    fingerprint: Tensor | None = None
    deferred_lanes: Tensor | None = None
    factors: Tensor | None = None
    record: bytes = b""


class Share(NamedTuple):
    """A side and the rows of a gradient, or of new weights, that belong to it.

    Attributes:
        number: of the gradient, in :class:`Look`.
    """

    side: DeviceSide
    rows: Tensor
    number: int = 0


class Update(NamedTuple):
    """One selective update. ``grad`` is of the shape of the side's state."""

    side: DeviceSide
    grad: Tensor
    coefficients: Coefficients


class Preview(NamedTuple):
    """A side, the rows of a gradient that its deferred weights are to show, and how much of it.

    Attributes:
        scale: factor of the gradient in fp32.
        size: learning rate times the share of an update that is shown.
    """

    side: DeviceSide
    rows: Tensor
    scale: float
    size: float


class Look(NamedTuple):
    """What a step looks at before it changes anything.

    Attributes:
        norms: of gradients that were taken before.
        grads: the others.
        exact: their norms are wanted, in fp32; else only whether they are finite.
        shares: those of ``grads`` whose selected channels are gathered at the same time; all rows of
            a gradient or none.
        watched: segments whose deferred channels nobody else should have written.
        rounded: residents whose weights should be their masters, rounded.
    """

    norms: Sequence[Tensor]
    grads: list[Tensor]
    exact: bool
    shares: Sequence[Share]
    watched: Sequence[DeviceSide]
    rounded: Sequence[DeviceSide]


def observe(look: Look, out: Tensor) -> None:
    """Write each gradient's norm, or any number that is finite only if every element is, then two
    numbers that are 0 if nobody else has written a weight. Gather the shares."""
    gather(look.shares)
    zero = out.new_zeros(())
    values = (
        *look.norms,
        *(norms(look.grads, exact=look.exact) if look.grads else ()),
        num_changed(look.watched) if look.watched else zero,
        difference(look.rounded) if look.rounded else zero,
    )
    out.copy_(torch.stack([value.float() for value in values]))


def norms(grads: list[Tensor], *, exact: bool) -> Sequence[Tensor]:
    """Each gradient's norm; unless ``exact``, in the gradient's own dtype."""
    return torch._foreach_norm(grads, 2, dtype=torch.float32 if exact else None)


def gather(shares: Sequence[Share]) -> None:
    """Copy the selected channels of each gradient into ``selected_grad``."""
    for side, rows, _ in shares:
        assert side.channels is not None and side.selected_grad is not None
        torch.index_select(rows, 1, side.channels, out=side.selected_grad)


def lanes(weight: Tensor) -> Tensor:
    """The bits of a weight ``[R, C(, K)]`` as integers ``[R, L]``, eight bytes each where they fit."""
    rows = weight.flatten(1)
    size = rows.element_size()
    row_bytes = rows.shape[1] * size
    packs = rows.stride(1) == 1 and (rows.stride(0) * size) % 8 == 0 and row_bytes % 8 == 0
    if packs and rows.storage_offset() * size % 8 == 0:
        return rows.view(torch.int64)
    return rows.view(torch.int32 if size == 4 else torch.int16)


def fingerprint(weight: Tensor, out: Tensor) -> None:
    """Write the sum of each lane over the rows, modulo 2**64: exact in any order."""
    torch.sum(lanes(weight), 0, dtype=torch.int64, out=out)


def num_changed(watched: Sequence[DeviceSide]) -> Tensor:
    """How many deferred lanes have lost their fingerprint."""
    actual = torch.cat([lanes(side.weight).sum(0, dtype=torch.int64) for side in watched])
    expected = torch.cat([_known(side.fingerprint) for side in watched])
    deferred = torch.cat([_known(side.deferred_lanes) for side in watched])
    return ((actual != expected) & deferred).sum()


def difference(rounded: Sequence[DeviceSide]) -> Tensor:
    """How far weights are from their masters, rounded; 0 only if none is."""
    weights = [side.weight for side in rounded]
    differences = [torch.empty_like(weight) for weight in weights]
    masters = [side.state.master for side in rounded if side.state is not None]
    torch._foreach_copy_(differences, masters)
    torch._foreach_sub_(differences, weights)
    return torch.stack(torch._foreach_norm(differences, 1)).amax()


def update(updates: Sequence[Update]) -> None:
    """The selective optimizer: AdamW on selected channels and resident parameters, then the
    weights."""
    states = [state for u in updates if (state := u.side.state) is not None]
    adamw_(
        [state.master for state in states],
        [state.exp_avg for state in states],
        [state.exp_avg_sq for state in states],
        [u.grad for u in updates],
        [u.coefficients for u in updates],
    )
    for u in updates:
        write_selected(u.side)


def write_selected(side: DeviceSide) -> None:
    """Write masters into the weight, rounded to its dtype."""
    weight, master = side.weight, _known(side.state).master
    if side.channels is not None:
        weight.index_copy_(1, side.channels, master.to(weight.dtype))
    elif weight.dtype != torch.float32:
        weight.copy_(master)


def publish(shares: Sequence[Share]) -> None:
    """Write the deferred ones of new weights of all channels, and take the fingerprint."""
    for side, rows, _ in shares:
        if side.channels is None:
            side.weight.copy_(rows)
        else:
            selected = side.weight.index_select(1, side.channels)
            side.weight.copy_(rows)
            side.weight.index_copy_(1, side.channels, selected)
        fingerprint(side.weight, _known(side.fingerprint))


def preview(shown: Sequence[Preview]) -> None:
    """Move deferred weights by what a gradient is going to do to them, roughly, and take the fingerprint.

    Each operation is rounded once: with ``r`` the row's factor times ``scale`` and ``c`` the column's,
    ``weight - clamp(clamp(grad * r, LARGEST) * c, BOUND) * size``.
    """
    for side, rows, scale, size in shown:
        weight, factors = side.weight, _known(side.factors)
        row, column = factors[: len(rows)], factors[len(rows) :].view(weight.shape[1:])
        move = rows * (row * scale).view(-1, *[1] * (weight.dim() - 1))  # in fp32
        move.clamp_(-previews.LARGEST, previews.LARGEST).mul_(column)
        weight.sub_(move.clamp_(-previews.BOUND, previews.BOUND).mul_(size))
        fingerprint(weight, _known(side.fingerprint))


def clear(factors: Tensor) -> None:
    """Without history nothing is shown."""
    factors.zero_()


def hide_selected(side: DeviceSide) -> None:
    """Previews leave the channels that are selected now alone."""
    factors = _known(side.factors)[len(side.weight) :]
    factors.masked_fill_(_known(side.is_selected).flatten(), 0)


_T = TypeVar("_T")


def _known(value: _T | None) -> _T:
    """What a side of the kind at hand has."""
    assert value is not None
    return value
