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


def energy_block_rows(row_numel: int) -> int:
    """Rows that :func:`channel_energy` sums at a time: a power of two, so that the fp32 temporary
    stays small against a large weight."""
    return 1 << max(0, (ENERGY_BLOCK_NUMEL // max(1, row_numel)).bit_length() - 1)


def channel_energy(grad_RCK: Tensor) -> Tensor:
    """Squared gradient norm of each channel, fp32 ``[C]``, of a gradient ``[R, C]`` or ``[R, C,
    K]``.

    On a CPU the order of additions is fixed, so that every kernel gives the same bits.
    """
    rows = grad_RCK.flatten(1)
    energy_CK = torch.zeros(rows.shape[1], dtype=torch.float32, device=rows.device)
    for block in rows.split(energy_block_rows(rows.shape[1])):
        squares = block.float().square()
        energy_CK += _sum_pairs(squares) if squares.is_cpu else squares.sum(0)
    return channel_sums(energy_CK, grad_RCK.shape[1])


def channel_sums(energy_CK: Tensor, num_channels: int) -> Tensor:
    """Energies of channels ``[C]`` from those of their ``K`` elements ``[C * K]``."""
    if energy_CK.numel() == num_channels:
        return energy_CK
    return _sum_pairs(energy_CK.view(num_channels, -1).t())


def _sum_pairs(values: Tensor) -> Tensor:
    """The sum over dimension 0: of each two neighbours, then of each two such sums, and so on."""
    while len(values) > 1:
        num_paired = len(values) // 2 * 2
        sums = values[0:num_paired:2] + values[1:num_paired:2]
        values = torch.cat([sums, values[num_paired:]]) if len(values) > num_paired else sums
    return values[0]


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
