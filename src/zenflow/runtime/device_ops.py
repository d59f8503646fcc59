"""What runs on the device for one tensor at a time: functions that write into tensors they are given.

What a step does to all of them is the device kernel's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow.backends.device_kernel import DeviceKernel
from zenflow.backends.reduce import Reduce
from zenflow.core.selection import select_channels
from zenflow.kernels import selective
from zenflow.kernels.selective import DeviceSide, SelectedState


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def checksum(weight: Tensor, out: Tensor) -> None:
    """Write the sum of the weight's bits as integers: exact, so the same in any order and place."""
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    out.copy_(weight.view(bits).sum(dtype=torch.int64))


def num_changed(watched: Sequence[DeviceSide], out: Tensor) -> None:
    """Write for each side how many deferred lanes have lost their fingerprint."""
    out.copy_(torch.stack([selective.num_changed([side]) for side in watched]))


def norm(grad: Tensor, out: Tensor) -> None:
    """Write one gradient's norm, in fp32."""
    out.copy_(torch.linalg.vector_norm(grad, dtype=torch.float32))


def count_nonfinite(grad: Tensor, scale: float, count: Tensor) -> None:
    """Write the number of elements that are not finite, or not when they are scaled."""
    scaled = grad if scale == 1 else grad.float() * scale
    count.copy_((~torch.isfinite(scaled)).sum())


def score(
    grad: Tensor, kernel: DeviceKernel, reduce: Reduce, chosen: Tensor, energies: Tensor | None
) -> None:
    """Write the channels that this gradient would select and, if asked, the channels' energies."""
    energy = kernel.energy(grad)
    reduce.sum(energy)
    chosen.copy_(select_channels(energy, chosen.numel()))
    if energies is not None:
        energies.copy_(energy)


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


def take_state(state: SelectedState, places: Tensor, out: Tensor) -> None:
    """Copy the state at ``places`` into ``out`` ``[3, R, n(, K)]``."""
    out.copy_(torch.stack([tensor.index_select(1, places) for tensor in state]))


def put_state(state: SelectedState, places: Tensor, values: Tensor) -> None:
    """Copy ``values`` ``[3, R, n(, K)]`` into the state at ``places``."""
    for tensor, value in zip(state, values, strict=True):
        tensor.index_copy_(1, places, value)
