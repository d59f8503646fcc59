"""Every learning rate schedule of torch, and its gradient scaler, as with AdamW.

Gradients here do not depend on the weights. So with overlap, once synchronized, "replay" has to equal
AdamW: every gradient was applied with the rate and the betas of its own step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((20, 30), (30,), (6, 8, 3, 3))
NUM_STEPS = 30
CONFIGS: dict[str, dict[str, Any]] = {
    "synchronous": {"overlap_step": False, "update_interval": 1, "select_interval": 3},
    "overlapped": {"update_interval": 4, "select_interval": 3, "topk_ratio": 0.2},
    "all selected": {"topk_ratio": 1},
}


class OneOverStep(lr_scheduler.LRScheduler):
    """A user's own."""

    def get_lr(self) -> list[float]:
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / NUM_STEPS),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [5, 6, 20]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, total_iters=9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, NUM_STEPS, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, NUM_STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=NUM_STEPS + 1),
    "of one's own": lambda o: OneOverStep(o),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.01, total_iters=9), lr_scheduler.StepLR(o, 5)], [9]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=9), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_the_table_has_every_schedule_of_torch() -> None:
    """Also those that torch does not list in ``__all__``, but for base classes and old names."""
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert set(SCHEDULERS) - {"of one's own"} == kinds - {"LRScheduler", "_LRScheduler"}
    assert kinds >= set(lr_scheduler.__all__)


def make_params() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def make_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[1:], "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


def grads_of(step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def assert_equal(params: list[nn.Parameter], reference: list[nn.Parameter]) -> None:
    for param, expected in zip(params, reference, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)


@pytest.mark.covers("learning rate schedules")
@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_as_with_adamw(name: str, config: str, rate: str) -> None:
    """A rate that is a tensor is written in place; a slot still carries its own step's."""
    params, reference = make_params(), make_params()
    groups, plain_groups = make_groups(params), make_groups(reference)
    for group in (*groups, *plain_groups) if rate == "tensor" else ():
        group["lr"] = torch.tensor(group["lr"])
    ours = zenflow.ZenFlowAdamW(groups, config=CONFIGS[config])
    plain = torch.optim.AdamW(plain_groups)
    pairs: list[tuple[list[nn.Parameter], Optimizer, Any]] = [
        (params, ours, SCHEDULERS[name](ours)),
        (reference, plain, SCHEDULERS[name](plain)),
    ]
    rates, momenta = set(), set()
    for step in range(NUM_STEPS):
        for each, optimizer, schedule in pairs:
            for param, grad in zip(each, grads_of(step), strict=True):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(1.0)
            else:
                schedule.step()
        momenta.add(ours.param_groups[0]["betas"][0])
        rates.add(float(ours.param_groups[0]["lr"]))
        for group, expected in zip(ours.param_groups, plain.param_groups, strict=True):
            assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])
    assert len(rates) > 1
    if name in ("CyclicLR", "OneCycleLR"):  # they cycle beta1, too
        assert len(momenta) > 5
    ours.synchronize()
    assert_equal(params, reference)
    ours.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_overlap_with_a_schedule_has_adamws_masters_in_bf16(config: str) -> None:
    """The masters; visible weights are those rounded."""
    params = [nn.Parameter(param.detach().bfloat16()) for param in make_params()]
    exact = [nn.Parameter(param.detach().float()) for param in params]
    ours = zenflow.ZenFlowAdamW(make_groups(params), config=CONFIGS[config])
    plain = torch.optim.AdamW(make_groups(exact))
    schedules = [SCHEDULERS["OneCycleLR"](ours), SCHEDULERS["OneCycleLR"](plain)]
    for step in range(NUM_STEPS):
        for param, other, grad in zip(params, exact, grads_of(step), strict=True):
            param.grad = grad.bfloat16()
            other.grad = param.grad.float()
        ours.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
    ours.synchronize()
    states = ours.state_dict()["state"]
    for number, (param, expected) in enumerate(zip(params, exact, strict=True)):
        master = states[number]["master"]
        torch.testing.assert_close(master, expected.detach(), rtol=0, atol=1e-6)
        assert torch.equal(param.detach(), master.bfloat16())
    ours.close()


@pytest.mark.covers("a gradient that is not finite", "autocast and GradScaler")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_gradient_scaler_as_with_adamw(config: str) -> None:
    """fp16-like loss scaling with unscale, clipping, and steps that the scaler itself skips."""
    params, reference = make_params(), make_params()
    ours = zenflow.ZenFlowAdamW(make_groups(params), config=CONFIGS[config])
    plain = torch.optim.AdamW(make_groups(reference))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in range(2)]
    for step in range(20):
        for each, optimizer, scaler in zip(
            (params, reference), (ours, plain), scalers, strict=True
        ):
            grads = grads_of(step)
            if step % 6 == 2:
                grads[0][3, 4] = float("inf")
            loss = torch.stack([(p * g).sum() for p, g in zip(each, grads, strict=True)]).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert ours.stats.step == 17
    ours.synchronize()
    assert_equal(params, reference)
    ours.close()


@pytest.mark.covers("learning rate schedules")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_rate_of_zero_at_the_first_step_moves_nothing(config: str) -> None:
    """Not then, and not when its gradient is applied later with another rate in force."""
    params = make_params()
    before = [param.detach().clone() for param in params]
    groups = [group | {"weight_decay": 0.5} for group in make_groups(params)]
    optimizer = zenflow.ZenFlowAdamW(groups, config=CONFIGS[config])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param, grad in zip(params, grads_of(0), strict=True):
        param.grad = grad
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    assert all(map(torch.equal, params, before))
    optimizer.synchronize()
    assert all(map(torch.equal, params, before))
    optimizer.close()


@pytest.mark.covers("moments at reselection")
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("rule", ["replay", "accumulate"])
def test_a_constant_gradient_goes_one_rate_a_step(rule: str, interval: int) -> None:
    """Through reselections with overlap: "replay" makes every step, "accumulate" one for a window,
    and neither ever makes more than its own updates."""
    param = nn.Parameter(torch.zeros(16, 20))
    config = {
        "update_interval": interval,
        "select_interval": 1,
        "topk_ratio": 0.3,
        "update_rule": rule,
        "lookahead": False,
    }
    optimizer = zenflow.ZenFlowAdamW([param], lr=1e-3, weight_decay=0.0, config=config)
    random = torch.Generator().manual_seed(0)
    num_steps = 200
    for _ in range(num_steps):
        param.grad = torch.ones(16, 20) * (1 + 1e-3 * torch.rand(20, generator=random))
        optimizer.step()
    optimizer.synchronize()
    moved = -param.detach() / 1e-3
    if rule == "replay":
        torch.testing.assert_close(moved, torch.full_like(moved, num_steps), rtol=0.01, atol=0)
    else:
        assert moved.max() <= 1.01 * num_steps
        assert moved.min() >= 0.99 * num_steps / interval
    optimizer.close()
