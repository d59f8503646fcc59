"""Previews: deferred weights show each gradient in its own step, roughly, until the host has applied it.

In the step of its gradient ``g``, a deferred weight moves by ``lr * SHARE * g / sqrt(v)``, where ``v`` is
the rank-one approximation of the second moment from its means over rows and over channels (Adafactor's,
arXiv:1804.04235). So the device needs a number for each row and each column, and no state. The next
publish, which holds the gradient, overwrites the move: nothing of it ever reaches the master.
"""

import torch
from torch import Tensor

SHARE = 0.3
"""Of an update ``lr * g / sqrt(v)``. AdamW itself shows ``1 - beta1`` of a gradient at once and the rest in
the steps that follow; while the window is open, more is owed. Measured in docs/convergence.md."""
BOUND = 3.0
"""Of one gradient over the root of its second moment; AdamW's update seldom exceeds 1."""
LARGEST = 1e30
"""Bound before the second factor, so that no product overflows."""
_LARGEST_RATIO = 1e6
_MAX_REFRESH_STEPS = 64
_CHUNK_NUMEL = 32_000
"""Elements at a time: torch sums so few in the calling thread."""


def refresh_is_due(step: int, known_at: int) -> bool:
    """Whether factors that were known at an update count (0: none are) are taken anew at ``step``.

    The second moment changes much at first and little later.
    """
    return step - known_at >= min(_MAX_REFRESH_STEPS, max(1, known_at // 4))


def write_factors(
    exp_avg_sq: Tensor,
    places: Tensor | None,
    columns: Tensor,
    bias2: float,
    eps: float,
    out: Tensor,
) -> None:
    """Write the factors whose product is about ``1 / sqrt(v)`` of each element.

    Sums are formed in double precision and factors rounded to 8 bits, so that they do not depend on the
    order in which a layout adds.

    Args:
        exp_avg_sq: raw second moment, fp32 ``[R, W]`` or ``[R, W, K]``.
        places: positions in ``W`` of the deferred channels; None: all, in the order of ``columns``.
        columns: the channel at each of those positions.
        bias2: what bias correction divides the second moment by.
        out: fp32 ``[R + C * K]``: the row factors, then those of the row's elements, 0 where a channel is
            selected or has no history. All 0 if the second moment is not finite: then nothing is shown.
    """
    num_rows, _, *kernel = exp_avg_sq.shape
    row_sums, column_sums = [], torch.zeros((), dtype=torch.float64, device="cpu")
    row_numel = max(1, exp_avg_sq[0].numel())
    for chunk in exp_avg_sq.split(max(1, _CHUNK_NUMEL // row_numel)):
        deferred = chunk if places is None else chunk.index_select(1, places)
        row_sums.append(deferred.flatten(1).sum(1, dtype=torch.float64))
        column_sums = column_sums + deferred.sum(0, dtype=torch.float64)
    rows = torch.cat(row_sums) / (max(1, column_sums.numel()) * bias2)
    means = column_sums / (num_rows * bias2)
    if not rows.mean().isfinite():  # of a gradient whose square is not
        out.zero_()
        return
    root = rows.rsqrt().reciprocal()
    out[:num_rows] = _short(torch.where(rows > 0, 1 / (root + eps), 0))
    ratios = (rows.mean() / means).rsqrt().reciprocal().clamp(max=_LARGEST_RATIO)
    by_channel = out[num_rows:].zero_().view(-1, *kernel)
    by_channel.index_copy_(0, columns, _short(torch.where(means > 0, ratios, 0)))


def _short(factors: Tensor) -> Tensor:
    """fp32 with the precision of bf16."""
    return factors.float().bfloat16().float()
