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


def norms(absorbed: Sequence[Tensor], grads: list[Tensor], exact: bool, out: Tensor) -> None:
    """Write each gradient's norm: it is finite only if every element is.

    Args:
        absorbed: norms taken before.
        exact: in fp32 whatever the gradient's dtype, to clip by; else only to see what is finite.
    """
    dtype = torch.float32 if exact else None
    found = torch._foreach_norm(grads, 2, dtype=dtype) if grads else ()
    out.copy_(torch.stack([norm.float() for norm in (*absorbed, *found)]))


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
