"""Where ZenFlow promises to be AdamW, it is."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(30, 41), (41,), (16, 30), (8, 5, 3, 3), (12, 9, 4), ()]
SYNCHRONOUS = {"overlap_step": False, "update_interval": 1}


def make_params() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def make_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[2:4], "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0},
        {"params": params[4:], "eps": 1e-5},
    ]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num_steps: int) -> None:
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps),
        ],
        [20],
    )
    random = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for number, param in enumerate(params):
            if (step + number) % 7 == 0:
                continue  # alternately used
            param.grad = torch.randn(param.shape, generator=random)
            if param.dim() >= 2:
                scale = torch.rand(param.shape[1], generator=random) * 2
                param.grad *= scale.reshape(1, -1, *[1] * (param.dim() - 2))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def largest_difference(one: list[nn.Parameter], other: list[nn.Parameter]) -> float:
    pairs = zip(one, other, strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


@pytest.mark.covers(
    "hyperparameters of each group", "learning rate schedules", "parameters without a gradient"
)
@pytest.mark.parametrize("ratio", [0, 0.05, 0.5, 1])
def test_synchronous_is_adamw(ratio: float) -> None:
    """200 steps, several groups, a schedule, weight decay, a reselection every 7 steps."""
    params, reference = make_params(), make_params()
    config = SYNCHRONOUS | {"topk_ratio": ratio, "select_interval": 7}
    optimizer = zenflow.ZenFlowAdamW(make_groups(params), config=config)
    reselections = []
    optimizer.register_step_post_hook(
        lambda *_: reselections.append(optimizer.stats.reselected_channels)
    )
    train(optimizer, params, 200)
    train(torch.optim.AdamW(make_groups(reference)), reference, 200)
    assert largest_difference(params, reference) <= 1e-6
    assert sum(map(bool, reselections)) >= 10 or ratio in (0, 1)
    optimizer.close()


@pytest.mark.parametrize("interval", [1, 4])
def test_all_selected_is_adamw_with_overlap(interval: int) -> None:
    params, reference = make_params(), make_params()
    config = {"topk_ratio": 1, "update_interval": interval}
    optimizer = zenflow.ZenFlowAdamW(make_groups(params), config=config)
    train(optimizer, params, 200)
    train(torch.optim.AdamW(make_groups(reference)), reference, 200)
    assert largest_difference(params, reference) <= 1e-6
    optimizer.close()


@pytest.mark.parametrize("rule", ["replay", "accumulate"])
def test_synchronous_has_the_same_bits_for_every_ratio(rule: str) -> None:
    results = []
    for ratio, select_interval in itertools.product((0, 0.05, 0.5, 1), (1, 5)):
        params = make_params()
        config = SYNCHRONOUS | {
            "topk_ratio": ratio,
            "select_interval": select_interval,
            "update_rule": rule,
        }
        optimizer = zenflow.ZenFlowAdamW(make_groups(params), config=config)
        train(optimizer, params, 40)
        optimizer.close()
        results.append(params)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_warm_up_rounds_are_adamw() -> None:
    params, reference = make_params(), make_params()
    config = {"update_interval": 4, "full_warm_up_rounds": 30, "topk_ratio": 0.1}
    optimizer = zenflow.ZenFlowAdamW(make_groups(params), config=config)
    train(optimizer, params, 30)
    assert optimizer.stats.staleness_steps == 0
    train(torch.optim.AdamW(make_groups(reference)), reference, 30)
    assert largest_difference(params, reference) <= 1e-6
    train(optimizer, params, 4)
    assert optimizer.stats.staleness_steps > 0
    optimizer.close()


@pytest.mark.covers("16-bit state")
@pytest.mark.parametrize("config", [{"overlap_step": False}, {"update_interval": 3}])
def test_bf16_weights_track_an_fp64_adamw_at_a_tiny_rate(config: dict[str, Any]) -> None:
    """A bf16 master would lose most of these updates. (Decay at this rate is below fp32 itself.)"""
    start = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    param = nn.Parameter(start.clone())
    exact = nn.Parameter(start.double())
    ours = zenflow.ZenFlowAdamW(
        [param], lr=1e-6, weight_decay=0.0, config=config | {"topk_ratio": 0.1}
    )
    plain = torch.optim.AdamW([exact], lr=1e-6, weight_decay=0.0)
    random = torch.Generator().manual_seed(1)
    for _ in range(1000):
        grad = (torch.randn(24, 40, generator=random) + 1).bfloat16()
        param.grad, exact.grad = grad, grad.double()
        ours.step()
        plain.step()
    ours.synchronize()
    master = ours.state_dict()["state"][0]["master"].double()
    ours.close()
    moved = (exact.detach() - start.double()).abs().mean()
    assert (master - exact).abs().mean() < 0.01 * moved
    assert torch.equal(param.detach(), master.float().bfloat16())


@pytest.mark.covers("moments at reselection")
@pytest.mark.parametrize("rule", ["replay", "accumulate"])
@pytest.mark.parametrize("interval", [1, 4])
def test_a_constant_gradient_never_oversteps(rule: str, interval: int) -> None:
    """Through a reselection at every opportunity, each update stays within 1% of the rate."""
    param = nn.Parameter(torch.zeros(16, 20))
    config = {
        "update_interval": interval,
        "select_interval": 1,
        "topk_ratio": 0.3,
        "update_rule": rule,
        "overlap_step": False,
        "lookahead": False,
    }
    optimizer = zenflow.ZenFlowAdamW([param], lr=1e-3, weight_decay=0.0, config=config)
    random = torch.Generator().manual_seed(0)
    most = interval if rule == "replay" else 1
    reselected = 0
    for _ in range(200):
        before = param.detach().clone()
        # constant for the moments' purposes; the noise only moves the choice
        param.grad = torch.ones(16, 20) * (1 + 1e-3 * torch.rand(20, generator=random))
        optimizer.step()
        reselected += optimizer.stats.reselected_channels
        moved = (param.detach() - before).abs()
        assert moved.max() <= 1.01e-3 * max(most, 1)
    assert reselected > 50
    optimizer.close()


@pytest.mark.covers("decoupled decay")
def test_decay_is_decoupled_and_exact() -> None:
    """Without a gradient signal, weights shrink by lr * weight_decay alone."""
    for interval in (1, 3):
        param = nn.Parameter(torch.ones(10, 12))
        config = {"update_interval": interval, "topk_ratio": 0.2}
        optimizer = zenflow.ZenFlowAdamW([param], lr=0.1, weight_decay=0.5, config=config)
        for _ in range(20):
            param.grad = torch.zeros(10, 12)
            optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        expected: Tensor = torch.tensor(0.95, dtype=torch.float64) ** 20
        torch.testing.assert_close(
            param.detach().double(), expected.expand(10, 12), rtol=1e-6, atol=0
        )


@pytest.mark.covers("learning rate schedules")
def test_a_rate_of_zero_moves_nothing() -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = zenflow.ZenFlowAdamW(params, lr=0.0, config={"update_interval": 2})
    for _ in range(5):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.close()
    assert all(map(torch.equal, params, before))
