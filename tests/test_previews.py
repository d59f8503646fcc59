"""Deferred weights show gradients that wait: near AdamW's between steps, and gone from what is exact."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from zenflow.core.preview import SHARE, refresh_is_due, write_factors

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 1e-2


def gradients(num_steps: int, shape: tuple[int, ...] = (48, 40)) -> list[Tensor]:
    """With a steady part, so that an update has a direction, and rows and columns of other sizes."""
    random = torch.Generator().manual_seed(0)
    rows = torch.rand(shape[0], generator=random).reshape(-1, *[1] * (len(shape) - 1))
    columns = torch.rand(shape[1], generator=random).reshape(1, -1, *[1] * (len(shape) - 2))
    steady = torch.randn(shape, generator=random)
    return [
        (steady + torch.randn(shape, generator=random)) * rows.square() * columns.square()
        for _ in range(num_steps)
    ]


def run_from(begin: Tensor, grads: list[Tensor], **config: Any) -> Tensor:
    """The exact weights after these gradients."""
    param = nn.Parameter(begin.clone())
    optimizer = zenflow.ZenFlowAdamW([param], lr=LR, config=config)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    optimizer.synchronize()
    optimizer.close()
    return param.detach()


def run(grads: list[Tensor], dtype: torch.dtype = torch.float32, **config: Any) -> list[Tensor]:
    """What the user sees after each step, and last what ``synchronize()`` leaves."""
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(grads[0].shape).to(dtype))
    optimizer = zenflow.ZenFlowAdamW([param], lr=LR, config=config)
    seen = []
    for grad in grads:
        param.grad = grad.to(dtype)
        optimizer.step()
        seen.append(param.detach().clone())
    optimizer.synchronize()
    optimizer.close()
    return [*seen, param.detach().clone()]


def adamw(grads: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(grads[0].shape))
    optimizer = torch.optim.AdamW([param], lr=LR)
    seen = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        seen.append(param.detach().clone())
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 40), (16, 12, 3, 3), (300, 500)])
@pytest.mark.parametrize("interval", [1, 3, 4])
def test_nothing_of_them_is_left(interval: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The same gradients end in the same bits, and the selected channels are the same at all times."""
    grads = gradients(13, shape)
    config = {"update_interval": interval, "topk_ratio": 0.1}
    shown, plain = (run(grads, dtype, preview=on, **config) for on in (True, False))
    assert torch.equal(shown[-1], plain[-1])
    assert not all(torch.equal(one, other) for one, other in zip(shown, plain, strict=True))


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_weights_are_nearer_to_adamws(interval: int) -> None:
    """Without lookahead, which is ahead of AdamW's on purpose."""
    grads = gradients(60)
    expected = adamw(grads)
    config = {"update_interval": interval, "topk_ratio": 0.0, "lookahead": False}

    def distance(**more: Any) -> float:
        seen = run(grads, **config, **more)[20:-1]
        pairs = zip(seen, expected[20:], strict=True)
        return sum(float((one - other).norm()) for one, other in pairs)

    assert distance(preview=True) < 0.95 * distance(preview=False)


@pytest.mark.parametrize(
    "config",
    [
        {"update_interval": 1, "overlap_step": False},
        {"update_interval": 3, "update_rule": "accumulate"},
        {"update_interval": 3, "topk_ratio": 1.0},
        {"update_interval": 3, "full_warm_up_rounds": 100},
    ],
)
def test_without_effect(config: dict[str, Any]) -> None:
    grads = gradients(9)
    shown, plain = (run(grads, preview=on, **config) for on in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(shown, plain, strict=True))


def test_without_effect_when_gradients_are_streamed() -> None:
    results = []
    for on in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30))
        config = {"update_interval": 3, "stream_gradients": True, "preview": on}
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=LR, config=config)
        for _ in range(7):
            model(torch.randn(5, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e30])
def test_a_move_is_bounded_whatever_the_gradient(size: float) -> None:
    grads = [grad * size for grad in gradients(6)]
    grads[-1] = grads[-1] * 1e6 if size <= 1 else grads[-1]
    config = {"update_interval": 8, "topk_ratio": 0.1, "lookahead": False}
    shown, plain = (run(grads, preview=on, **config) for on in (True, False))
    for one, other in zip(shown, plain, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).abs().max() <= 8 * 3 * SHARE * LR * 1.001


def test_a_gradient_of_an_element_without_history_is_not_shown() -> None:
    """Such as a row of an embedding for a word that has not occurred."""
    grads = gradients(6)
    for grad in grads[:-1]:
        grad[3], grad[:, 5] = 0, 0
    config = {"update_interval": 8, "topk_ratio": 0.1, "lookahead": False}
    shown, plain = (run(grads, preview=on, **config) for on in (True, False))
    assert torch.equal(shown[5][3], plain[5][3])
    assert torch.equal(shown[5][:, 5], plain[5][:, 5])


@pytest.mark.parametrize("into", [True, False], ids=["switched on", "switched off"])
def test_a_state_saved_with_or_without_them_is_loaded(into: bool) -> None:
    grads = gradients(10)
    begin = torch.randn(48, 40)
    params = [nn.Parameter(begin.clone())]
    config = {"update_interval": 3, "topk_ratio": 0.1, "preview": not into}
    first = zenflow.ZenFlowAdamW(params, lr=LR, config=config)
    for grad in grads[:5]:
        params[0].grad = grad.clone()
        first.step()
    state = copy.deepcopy(first.state_dict())
    again = [nn.Parameter(params[0].detach().clone())]
    first.close()
    second = zenflow.ZenFlowAdamW(again, lr=LR, config=config | {"preview": into})
    second.load_state_dict(state)
    for grad in grads[5:]:
        again[0].grad = grad.clone()
        second.step()
    second.synchronize()
    second.close()
    assert torch.equal(again[0], run_from(begin, grads, update_interval=3, topk_ratio=0.1))


def test_factors_are_the_rank_one_second_moment() -> None:
    rows, columns = torch.rand(7, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    exp_avg_sq = (rows[:, None] * columns[None, :]).float()
    out = torch.full((16,), torch.nan)
    write_factors(exp_avg_sq * 0.25, None, torch.arange(9), 0.25, 0.0, out)
    product = out[:7, None] * out[None, 7:]
    torch.testing.assert_close(product, exp_avg_sq.rsqrt(), rtol=1 / 64, atol=0)


def test_factors_of_chosen_places() -> None:
    exp_avg_sq = torch.rand(300, 200)  # more than is summed at a time
    places = torch.arange(0, 200, 3)
    out, alone = torch.zeros(500), torch.zeros(500)
    write_factors(exp_avg_sq, places, places, 1.0, 1e-8, out)
    write_factors(exp_avg_sq[:, places].contiguous(), None, places, 1.0, 1e-8, alone)
    assert torch.equal(out, alone)
    hidden = torch.ones(200, dtype=torch.bool)
    hidden[places] = False
    assert not out[300:][hidden].any() and out[300:][~hidden].all()


def test_factors_are_taken_ever_less_often() -> None:
    taken, known_at = [], 0
    for step in range(1, 1000):
        if refresh_is_due(step, known_at):
            known_at = step
            taken.append(step)
    assert taken[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    gaps = [b - a for a, b in itertools.pairwise(taken)]
    assert gaps == sorted(gaps) and gaps[-1] == 64


def test_factors_stay_on_the_host_under_another_default_device() -> None:
    out, exp_avg_sq, columns = torch.zeros(7), torch.ones(3, 4), torch.arange(4)
    with torch.device("meta"):
        write_factors(exp_avg_sq, None, columns, 1.0, 0.0, out)
    assert torch.equal(out, torch.ones(7))
