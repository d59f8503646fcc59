"""Update rules as numbers: what one AdamW sub-step of one gradient is made of.

A gradient keeps the hyperparameters of the step that produced it, so a sweep that applies it later
applies the same sub-step that AdamW would have applied then (Loshchilov & Hutter,
arXiv:1711.05101).
"""

import math
from typing import NamedTuple


class Coefficients(NamedTuple):
    """One sub-step's scalars, computed in double precision and applied in fp32.

    The update, each operation rounded once (this order is the contract of every kernel)::

        g   = float32(grad) * scale              # skipped when scale == 1
        p   = p * decay
        m   = m * beta1 + g * one_minus_beta1
        v   = v * beta2 + (g * g) * one_minus_beta2
        den = sqrt(v) * inv_sqrt_bias2 + eps
        u   = (m / den) * step_size
        p   = p - u
    """

    scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    step_size: float


class SubStep(NamedTuple):
    """The hyperparameters one gradient was produced under.

    Attributes:
        step: the parameter's step count including this gradient; 1 for the first.
        scale: factor applied to the gradient in fp32 before anything else (clipping, unscaling).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    scale: float = 1.0

    def coefficients(self) -> Coefficients:
        bias1 = 1.0 - self.beta1**self.step
        bias2 = 1.0 - self.beta2**self.step
        return Coefficients(
            scale=self.scale,
            decay=1.0 - self.lr * self.weight_decay,
            beta1=self.beta1,
            one_minus_beta1=1.0 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1.0 - self.beta2,
            inv_sqrt_bias2=1.0 / math.sqrt(bias2),
            eps=self.eps,
            step_size=self.lr / bias1,
        )


def rebias_factor(beta: float, from_step: int, to_step: int) -> float:
    """Factor that keeps a moment's bias-corrected value when its step count changes.

    ``m / (1 - beta**from_step)`` is what an update reads. A channel that changes sides meets the
    step count of its new side; scaling the moment by ``(1 - beta**to_step) / (1 -
    beta**from_step)`` lets it keep what it knows. Under ``replay`` both counts are equal and the
    factor is exactly 1. A moment without history (``from_step == 0``) is zero, whatever it is
    scaled by.
    """
    if from_step == to_step or from_step == 0:
        return 1.0
    return (1.0 - beta**to_step) / (1.0 - beta**from_step)
