"""What the reference kernel applies: AdamW's formula, slots in order or their mean, lookahead."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zenflow.core.rules import Coefficients, SubStep
from zenflow.kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
State = tuple[Tensor, Tensor, Tensor]


def randn(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state(numel: int = 100) -> State:
    return randn(numel, 0), randn(numel, 1) * 0.1, randn(numel, 2).square() * 0.01


def substep(step: int = 3, scale: float = 1.0, **changes: Any) -> Coefficients:
    values = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    return SubStep(**(values | changes), step=step, scale=scale).coefficients()


def apply(tensors: State, grad: Tensor, c: Coefficients) -> Tensor:
    (update,) = reference.adamw_(*([t] for t in tensors), [grad], [c])
    return update


def sweep(
    tensors: State,
    grads: list[Tensor],
    coefficients: list[Coefficients],
    *,
    mean: bool = False,
    delay: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    out = torch.empty(tensors[0].shape, dtype=dtype)
    reference.sweep(*tensors, grads, coefficients, mean=mean, delay=delay, out=out)
    return out


def same_bits(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, other, strict=True)
    )


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_one_substep_is_adamw_in_fp64(step: int, scale: float) -> None:
    tensors, grad = state(500), randn(500, 3)
    p, m, v = (t.double() for t in tensors)
    g = grad.double() * scale
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g**2
    u = 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
    update = apply(tensors, grad, substep(step, scale))
    for ours, exact in zip((*tensors, update), (p * (1 - 1e-3) - u, m, v, u), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sweep_is_its_substeps_oldest_first(dtype: torch.dtype) -> None:
    grads = [randn(100, 10 + i, dtype) for i in range(4)]
    coefficients = [
        substep(i + 1, lr=10.0 ** -(i + 1), eps=1e-8 * i, weight_decay=0.1 * i) for i in range(4)
    ]
    swept, stepped, backwards = state(), state(), state()
    out = sweep(swept, grads, coefficients, dtype=dtype)
    for grad, c in zip(grads, coefficients, strict=True):
        apply(stepped, grad, c)
    assert same_bits((*swept, out), (*stepped, stepped[0].to(dtype)))
    sweep(backwards, grads[::-1], coefficients)
    assert not same_bits(swept, backwards)


def test_the_mean_has_every_scale_and_the_last_substep() -> None:
    grads = [randn(100, 10 + i, torch.bfloat16) for i in range(3)]
    coefficients = [substep(i + 1, scale=0.3**i, lr=10.0**-i) for i in range(3)]
    swept, stepped = state(), state()
    out = sweep(swept, grads, coefficients, mean=True)
    total = grads[0].float() + grads[1].float() * 0.3
    total = total + grads[2].float() * 0.3**2
    apply(stepped, total * (1 / 3), coefficients[-1]._replace(scale=1.0))
    assert same_bits((*swept, out), (*stepped, stepped[0]))


@pytest.mark.parametrize("delay", [0.0, 0.5, 2.5])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lookahead_is_published_and_the_master_stays(
    delay: float, mean: bool, dtype: torch.dtype
) -> None:
    grads, coefficients = [randn(100, 10), randn(100, 11)], [substep(1), substep(2)]
    ahead, plain = state(), state()
    out = sweep(ahead, grads, coefficients, mean=mean, delay=delay, dtype=dtype)
    sweep(plain, grads, coefficients, mean=mean)
    assert same_bits(ahead, plain)
    # The update again, from the moments that the sweep left.
    _, m, v = (t.double() for t in plain)
    update = 1e-2 * (m / (1 - 0.9**2)) / ((v / (1 - 0.99**2)).sqrt() + 1e-8)
    expected = plain[0].double() - delay * update
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6)
    assert torch.equal(out, plain[0].to(dtype)) == (delay == 0)


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_writing_again_writes_what_the_sweep_wrote(delay: float) -> None:
    """What a resumed run needs for a sweep that was in flight."""
    tensors = state()
    swept = sweep(tensors, [randn(100, 10)], [substep(2)], delay=delay, dtype=torch.bfloat16)
    before = tuple(t.clone() for t in tensors)
    written = torch.empty_like(swept)
    reference.write(*tensors, substep(2), delay, written)
    assert same_bits((*tensors, written), (*before, swept))


@pytest.mark.parametrize("chunk_numel", [1, 7, 99, 100])
@pytest.mark.parametrize("mean", [False, True])
def test_chunks_make_no_difference(
    chunk_numel: int, mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads, coefficients = [randn(100, 10), randn(100, 11)], [substep(1), substep(2, 0.5)]
    whole, cut = state(), state()
    expected = sweep(whole, grads, coefficients, mean=mean, delay=2.5)
    monkeypatch.setattr(reference, "CHUNK_NUMEL", chunk_numel)
    out = sweep(cut, grads, coefficients, mean=mean, delay=2.5)
    assert same_bits((*cut, out), (*whole, expected))


def test_tensors_of_one_call_do_not_meet() -> None:
    """The device updates all its tensors in one call, each with its own coefficients and scale."""
    sizes, tensors = (100, 1, 33), [state(100), state(1), state(33)]
    alone = [state(size) for size in sizes]
    grads = [randn(size, 20 + size) for size in sizes]
    coefficients = [substep(1), substep(9, 0.25, lr=0.5), substep(2, eps=1e-3)]
    columns = (list(column) for column in zip(*tensors, strict=True))
    updates = reference.adamw_(*columns, grads, coefficients)
    for together, single, update, grad, c in zip(
        tensors, alone, updates, grads, coefficients, strict=True
    ):
        assert torch.equal(apply(single, grad, c), update)
        assert same_bits(together, single)


def test_gradients_are_only_read() -> None:
    """Where memory is shared, one is a slot of several segments and a selected part at once."""
    grads = [randn(100, 10), randn(100, 11)]
    before = tuple(grad.clone() for grad in grads)
    for mean in (False, True):
        sweep(state(), grads, [substep(1, 0.5), substep(2, 0.5)], mean=mean, delay=1.0)
    apply(state(), grads[0], substep(1, 0.5))
    apply(state(), grads[0], substep(1))
    assert same_bits(tuple(grads), before)
