"""AdamW in plain torch, each operation rounded once, in the order of ``core.rules.Coefficients``.

Element-wise operations of one rounding each give the same bits wherever an element lies and
whichever side updates it, so a channel may change sides without a trace.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow.core.rules import Coefficients

CHUNK_NUMEL = 32_000
"""Elements swept at a time: state and temporaries stay in cache, and torch runs so few in the
calling thread alone, so a host worker never opens a thread pool of its own."""


def adamw_(
    masters: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    grads: list[Tensor],
    coefficients: Sequence[Coefficients],
) -> list[Tensor]:
    """One sub-step on each of several tensors, in place; all fp32 except ``grads``.

    Returns:
        The update that was subtracted from each master: what lookahead extrapolates by.
    """
    c = [list(column) for column in zip(*coefficients, strict=True)]
    scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, *_ = c
    grads32 = [g.float() for g in grads]
    if any(factor != 1.0 for factor in scale):
        grads32 = list(torch._foreach_mul(grads32, scale))
    torch._foreach_mul_(masters, decay)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, torch._foreach_mul(grads32, one_minus_beta1))
    squares = torch._foreach_mul(grads32, grads32)
    torch._foreach_mul_(squares, one_minus_beta2)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_add_(exp_avg_sqs, squares)
    updates = _updates(exp_avgs, exp_avg_sqs, coefficients)
    torch._foreach_sub_(masters, updates)
    return updates


def _updates(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], coefficients: Sequence[Coefficients]
) -> list[Tensor]:
    denominators = _sqrt(exp_avg_sqs)
    torch._foreach_mul_(denominators, [c.inv_sqrt_bias2 for c in coefficients])
    torch._foreach_add_(denominators, [c.eps for c in coefficients])
    updates = torch._foreach_div(exp_avgs, denominators)
    torch._foreach_mul_(updates, [c.step_size for c in coefficients])
    return list(updates)


def _sqrt(tensors: list[Tensor]) -> list[Tensor]:
    """Correctly rounded square roots of fp32 tensors.

    On a CPU, torch takes roots by MKL's vector library. Its fp32 roots are one ulp off for one
    value in 170, where accelerators and the native kernel round correctly. For either precision it
    opens a thread pool in every calling thread, which collapses when the cores are taken, and a
    first call in several threads at once may compute with low accuracy (pytorch/pytorch#188792).
    ``rsqrt`` and ``reciprocal`` are torch's own code. In fp64 they are accurate enough to round to
    the right fp32 value, for all of them (compared one by one).
    """
    if not tensors[0].is_cpu:
        return list(torch._foreach_sqrt(tensors))
    return [tensor.double().rsqrt_().reciprocal_().float() for tensor in tensors]


def sweep(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Sequence[Tensor],
    coefficients: Sequence[Coefficients],
    *,
    mean: bool,
    delay: float,
    out: Tensor,
) -> None:
    """See :meth:`zenflow.backends.host_kernel.HostKernel.sweep`."""
    flats = [t.reshape(-1) for t in (master, exp_avg, exp_avg_sq, out, *grads)]
    for chunks in zip(*(flat.split(CHUNK_NUMEL) for flat in flats), strict=True):
        p, m, v, weights, *chunk_grads = chunks
        if mean:
            chunk_grads = [mean_grad(chunk_grads, [c.scale for c in coefficients])]
        steps = [coefficients[-1]._replace(scale=1.0)] if mean else coefficients
        update = p
        for grad, step in zip(chunk_grads, steps, strict=True):
            (update,) = adamw_([p], [m], [v], [grad], [step])
        _write_weights(p, update, delay, weights)


def write(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last: Coefficients,
    delay: float,
    out: Tensor,
) -> None:
    """See :meth:`zenflow.backends.host_kernel.HostKernel.write`."""
    flats = [t.reshape(-1).split(CHUNK_NUMEL) for t in (master, exp_avg, exp_avg_sq, out)]
    for p, m, v, weights in zip(*flats, strict=True):
        update = p if delay == 0 else _updates([m], [v], [last])[0]
        _write_weights(p, update, delay, weights)


def mean_grad(grads: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """fp32 mean of scaled gradients, summed oldest first."""
    total = grads[0].float() * scales[0]
    for grad, scale in zip(grads[1:], scales[1:], strict=True):
        total = total + grad.float() * scale
    return total * (1.0 / len(grads))


def _write_weights(master: Tensor, update: Tensor, delay: float, out: Tensor) -> None:
    out.copy_(master if delay == 0 else master - update * delay)
