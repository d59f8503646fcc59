"""Which channels are selected: top-k columns by squared gradient norm (ZenFlow, section 3.1)."""

import torch
from torch import Tensor

ENERGY_BLOCK_NUMEL = 1 << 22
AUTO_INTERVAL_MIN = 4
AUTO_INTERVAL_MAX = 64
_AUTO_STABLE = 0.1
_AUTO_UNSTABLE = 0.3


def num_selected(num_channels: int, topk_ratio: float) -> int:
    """``round(topk_ratio * num_channels)``, but at least one channel for any ratio above 0."""
    if topk_ratio == 0 or num_channels == 0:
        return 0
    return min(num_channels, max(1, round(topk_ratio * num_channels)))


def channel_energy(grad_RCK: Tensor) -> Tensor:
    """Squared gradient norm of each channel, fp32 ``[C]``, of a gradient ``[R, C]`` or ``[R, C,
    K]``.

    Taken over blocks of rows, so that the fp32 temporary stays small against a large weight.
    """
    other_dims = [0] if grad_RCK.dim() == 2 else [0, 2]
    row_numel = max(1, grad_RCK[0].numel())
    energy_C = torch.zeros(grad_RCK.shape[1], device=grad_RCK.device)
    for block in grad_RCK.split(max(1, ENERGY_BLOCK_NUMEL // row_numel)):
        energy_C += block.float().square().sum(dim=other_dims)
    return energy_C


def select_channels(energy_C: Tensor, num: int) -> Tensor:
    """The ``num`` channels of highest energy in ascending order, int64 ``[num]``.

    Of equal energies the lower index wins, so that equal scores choose equally on every rank.
    """
    order = torch.sort(energy_C, descending=True, stable=True).indices
    return order[:num].sort().values


def next_interval(interval: int, changed_fraction: float) -> int:
    """The ``"auto"`` reselection interval after a reselection that changed this share of channels.

    Important channels are stable in time (ZenFlow, section 3.2): while few change, look half as
    often; when many change, twice as often.
    """
    if changed_fraction < _AUTO_STABLE:
        return min(2 * interval, AUTO_INTERVAL_MAX)
    if changed_fraction > _AUTO_UNSTABLE:
        return max(interval // 2, AUTO_INTERVAL_MIN)
    return interval
