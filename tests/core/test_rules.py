"""A sub-step's numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.rules import SubStep, rebias_factor

betas = st.floats(0, 0.9999)
counts = st.integers(1, 10_000)


@given(st.floats(0, 1), betas, betas, st.floats(0, 1), st.floats(0, 1), counts)
def test_coefficients_are_adamws(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, step: int
) -> None:
    c = SubStep(lr, beta1, beta2, eps, decay, step, scale=0.25).coefficients()
    assert c.scale == 0.25
    assert c.decay == 1 - lr * decay
    assert (c.beta1, c.one_minus_beta1) == (beta1, 1 - beta1)
    assert (c.beta2, c.one_minus_beta2) == (beta2, 1 - beta2)
    assert c.inv_sqrt_bias2 == 1 / math.sqrt(1 - beta2**step)
    assert c.step_size == lr / (1 - beta1**step)
    assert c.eps == eps


def test_a_first_step_is_the_size_of_lr() -> None:
    c = SubStep(1e-3, 0.9, 0.999, 0.0, 0.0, 1).coefficients()
    grad = 5.0
    m, v = grad * c.one_minus_beta1, grad**2 * c.one_minus_beta2
    assert m / (math.sqrt(v) * c.inv_sqrt_bias2) * c.step_size == pytest.approx(1e-3, rel=1e-12)


@given(betas, counts, counts)
def test_rebias_keeps_what_an_update_reads(beta: float, before: int, after: int) -> None:
    moment = rebias_factor(beta, before, after)
    assert moment / (1 - beta**after) == pytest.approx(1 / (1 - beta**before), rel=1e-12)


@given(betas, counts, counts)
def test_rebias_there_and_back(beta: float, one: int, other: int) -> None:
    there_and_back = rebias_factor(beta, one, other) * rebias_factor(beta, other, one)
    assert there_and_back == pytest.approx(1, rel=1e-12)


@given(betas, st.integers(0, 10_000))
def test_rebias_to_the_same_count_is_exact(beta: float, count: int) -> None:
    assert rebias_factor(beta, count, count) == 1.0


@given(betas, counts)
def test_a_moment_without_history_stays(beta: float, count: int) -> None:
    assert rebias_factor(beta, 0, count) == 1.0
