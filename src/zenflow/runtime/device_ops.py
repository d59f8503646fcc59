"""What runs on the device: functions that write into tensors they are given."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.backends.reduce import Reduce
from zenflow.core.rules import Coefficients
from zenflow.core.selection import channel_energy, select_channels
from zenflow.kernels.reference import adamw_


class SelectedState(NamedTuple):
    """fp32 state on the device: of a segment's selected channels, or of a whole resident
    parameter."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class DeviceUpdate(NamedTuple):
    """One selective update. ``channels`` are those of ``weight``; None means the whole tensor."""

    weight: Tensor
    channels: Tensor | None
    state: SelectedState
    grad: Tensor
    coefficients: Coefficients


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def checksum(weight: Tensor, out: Tensor) -> None:
    """Write the sum of the weight's bits as integers: exact, so the same in any order and place."""
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    out.copy_(weight.view(bits).sum(dtype=torch.int64))


def lanes(weight: Tensor) -> Tensor:
    """The bits of a weight ``[R, C(, K)]`` as integers ``[R, L]``, eight bytes each where they fit."""
    rows = weight.flatten(1)
    size = rows.element_size()
    row_bytes = rows.shape[1] * size
    packs = rows.stride(1) == 1 and (rows.stride(0) * size) % 8 == 0 and row_bytes % 8 == 0
    if packs and rows.storage_offset() * size % 8 == 0:
        return rows.view(torch.int64)
    return rows.view(torch.int32 if size == 4 else torch.int16)


class Watch(NamedTuple):
    """A weight, its fingerprint as the runtime left it, and which lanes of it count."""

    weight: Tensor
    fingerprint: Tensor
    lanes: Tensor


def fingerprint(weight: Tensor, out: Tensor) -> None:
    """Write the sum of each lane over the rows, modulo 2**64: exact in any order."""
    torch.sum(lanes(weight), 0, dtype=torch.int64, out=out)


def _num_changed(watches: Sequence[Watch]) -> Tensor:
    """How many lanes that count have lost their fingerprint."""
    actual = torch.cat([lanes(w.weight).sum(0, dtype=torch.int64) for w in watches])
    expected = torch.cat([w.fingerprint for w in watches])
    return ((actual != expected) & torch.cat([w.lanes for w in watches])).sum()


def num_changed(watches: Sequence[Watch], out: Tensor) -> None:
    """The same for each watch by itself."""
    out.copy_(torch.stack([_num_changed([watch]) for watch in watches]))


def observe(
    absorbed: Sequence[Tensor],
    grads: list[Tensor],
    exact: bool,
    watches: Sequence[Watch],
    rounded: Sequence[tuple[Tensor, Tensor]],
    out: Tensor,
) -> None:
    """Write each gradient's norm (finite only if every element is), then two numbers that are 0 if
    nobody else has written a weight.

    Args:
        absorbed: norms taken before.
        exact: norms in fp32 whatever the gradient's dtype, to clip by; else only to see what is finite.
        watches: deferred channels.
        rounded: masters, and the weights that are these masters, rounded.
    """
    dtype = torch.float32 if exact else None
    found = torch._foreach_norm(grads, 2, dtype=dtype) if grads else ()
    zero = out.new_zeros(())
    changed = _num_changed(watches) if watches else zero
    differ = _difference(rounded) if rounded else zero
    values = (*absorbed, *found, changed, differ)
    out.copy_(torch.stack([value.float() for value in values]))


def _difference(rounded: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    weights = [weight for _, weight in rounded]
    differences = [torch.empty_like(weight) for weight in weights]
    torch._foreach_copy_(differences, [master for master, _ in rounded])
    torch._foreach_sub_(differences, weights)
    return torch.stack(torch._foreach_norm(differences, 1)).amax()


def norm(grad: Tensor, out: Tensor) -> None:
    """Write one gradient's norm, in fp32."""
    out.copy_(torch.linalg.vector_norm(grad, dtype=torch.float32))


def count_nonfinite(grad: Tensor, count: Tensor) -> None:
    """Write the number of elements that are not finite (a norm may also overflow by itself)."""
    count.copy_((~torch.isfinite(grad)).sum())


def update(updates: Sequence[DeviceUpdate]) -> None:
    """The selective optimizer: AdamW on selected channels and resident parameters, then the
    weights."""
    adamw_(
        [u.state.master for u in updates],
        [u.state.exp_avg for u in updates],
        [u.state.exp_avg_sq for u in updates],
        [u.grad for u in updates],
        [u.coefficients for u in updates],
    )
    for u in updates:
        write_selected(u.weight, u.channels, u.state.master)


def write_selected(weight: Tensor, index: Tensor | None, master: Tensor) -> None:
    """Write masters into the weight, rounded to its dtype."""
    if index is not None:
        weight.index_copy_(1, index, master.to(weight.dtype))
    elif weight.dtype != torch.float32:
        weight.copy_(master)


def score(grad: Tensor, reduce: Reduce, chosen: Tensor) -> None:
    """Write the channels that this gradient would select."""
    energy = channel_energy(grad)
    reduce.sum(energy)
    chosen.copy_(select_channels(energy, chosen.numel()))


def gather(source: Tensor, index: Tensor, target: Tensor) -> None:
    """Copy the indexed channels of ``source`` into ``target``, converting the dtype if they
    differ."""
    if source.dtype == target.dtype:
        torch.index_select(source, 1, index, out=target)
    else:
        target.copy_(source.index_select(1, index))


def scatter(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Copy ``source`` into the indexed channels of ``target``."""
    target.index_copy_(1, index, source)


def publish_all(
    weight: Tensor, staged: Tensor, index: Tensor | None, master: Tensor | None
) -> None:
    """Write every channel, then the selected ones from their own masters."""
    weight.copy_(staged)
    if index is not None and master is not None:
        write_selected(weight, index, master)


def take_state(state: SelectedState, places: Tensor, out: Tensor) -> None:
    """Copy the state at ``places`` into ``out`` ``[3, R, n(, K)]``."""
    out.copy_(torch.stack([tensor.index_select(1, places) for tensor in state]))


def put_state(state: SelectedState, places: Tensor, values: Tensor) -> None:
    """Copy ``values`` ``[3, R, n(, K)]`` into the state at ``places``."""
    for tensor, value in zip(state, values, strict=True):
        tensor.index_copy_(1, places, value)
