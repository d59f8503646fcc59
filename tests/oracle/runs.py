"""Random training runs of the optimizer beside the oracle."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zenflow
from zenflow.testing.oracle import Oracle

SHAPES = (
    ((40, 24), (24,), (), (0,), (33, 17), (6, 12, 3, 3), (5, 9, 4), (4, 0)),
    ((700, 200), (17, 31)),  # the first is cut into row blocks
    ((9, 8), (64, 1), (1, 64), (3, 3)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AXES: dict[str, tuple[Any, ...]] = {
    "update_rule": ("replay", "accumulate"),
    "update_interval": (1, 2, 3, 4),
    "topk_ratio": (0, 0.05, 0.3, 1),
    "lookahead": (True, False),
    "overlap_step": (True, False),
    "select_interval": (1, 3, "auto"),
    "dtype": DTYPES,
    "shapes": SHAPES,
}
PRODUCT = list(itertools.product(*AXES.values()))


@dataclass
class Run:
    """One configuration and everything random that belongs to its number."""

    number: int
    point: dict[str, Any]

    @classmethod
    def at(cls, number: int) -> "Run":
        return cls(number, dict(zip(AXES, PRODUCT[number], strict=True)))

    @property
    def config(self) -> dict[str, Any]:
        extra = {
            "full_warm_up_rounds": self.number % 4 if self.number % 2 else 0,
            "host_threads": 1 + 2 * (self.number % 2),
            "max_grad_norm": 1.0 if self.number % 5 == 0 else None,
            "preview": self.number % 7 != 0,
        }
        names = set(AXES) - {"dtype", "shapes"}
        return {name: self.point[name] for name in names} | extra


def grad_like(param: Tensor, random_: torch.Generator) -> Tensor:
    """Random, with a random size, so that channels change places."""
    grad = torch.randn(param.shape, generator=random_)
    if grad.dim() >= 2:
        sizes = torch.rand(grad.shape[1], generator=random_) ** 3
        grad = grad * sizes.reshape(1, -1, *[1] * (grad.dim() - 2))
    return grad.to(param.dtype)


def compare(run: Run, num_steps: int = 18) -> int:
    """Train both and compare every bit after every step; returns the steps that were skipped."""
    choose = random.Random(run.number)
    numbers = torch.Generator().manual_seed(run.number)
    dtype, shapes = run.point["dtype"], run.point["shapes"]
    weights = [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]
    params = [nn.Parameter(weight.clone()) for weight in weights]
    if choose.random() < 0.3:
        params[0] = nn.Parameter(weights[0].t().contiguous().t())  # not contiguous
    cut = choose.randrange(len(params) + 1)
    groups = [
        {"params": range(cut), "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"params": range(cut, len(params)), "betas": (0.8, 0.95), "eps": 1e-6},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = zenflow.ZenFlowAdamW(
        [group | {"params": [params[i] for i in group["params"]]} for group in groups],
        config=run.config,
    )
    oracle = Oracle(weights, groups, optimizer.config)
    num_skipped = 0
    try:
        for step in range(num_steps):
            disturb(choose, numbers, params, optimizer, oracle)
            lr = 0.0 if step == 0 or choose.random() < 0.1 else choose.random() * 1e-2
            for number, (ours, its) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                ours["lr"] = its["lr"] = lr * (number + 1)
            grads = list(draw_grads(choose, numbers, params))
            for param, grad in zip(params, grads, strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
            oracle.step(grads)
            num_skipped += oracle.skipped
            assert_same(step, params, optimizer, oracle)
        optimizer.synchronize()
        oracle.synchronize()
        assert_same(num_steps, params, optimizer, oracle)
        assert_same_state(params, optimizer, oracle)
    finally:
        optimizer.close()
    return num_skipped


def disturb(
    choose: random.Random,
    numbers: torch.Generator,
    params: list[Tensor],
    optimizer: zenflow.ZenFlowAdamW,
    oracle: Oracle,
) -> None:
    """Now and then the user synchronizes, or writes a weight."""
    what = choose.random()
    if what < 0.07:
        optimizer.synchronize()
        oracle.synchronize()
    elif what < 0.11:
        index = choose.randrange(len(params))
        value = torch.randn(params[index].shape, generator=numbers).to(params[index].dtype)
        with torch.no_grad():
            params[index].copy_(value)
        oracle.edit(index, value)


def draw_grads(
    choose: random.Random, numbers: torch.Generator, params: list[Tensor]
) -> Iterator[Tensor | None]:
    """Some parameters have none; sometimes one is not finite."""
    bad = choose.random() < 0.06
    for param in params:
        if choose.random() > 0.85:
            yield None
            continue
        grad = grad_like(param, numbers)
        if bad and grad.numel():
            grad.view(-1)[-1] = choose.choice([float("nan"), float("inf"), float("-inf")])
            bad = False
        yield grad


def assert_same(
    step: int, params: list[Tensor], optimizer: zenflow.ZenFlowAdamW, oracle: Oracle
) -> None:
    for number, (param, expected) in enumerate(zip(params, oracle.weights(), strict=True)):
        assert same_bits(param.detach(), expected), f"weight {number} after step {step}"
    assert optimizer.stats.staleness_steps == oracle.staleness(), step
    assert optimizer.stats.step == oracle.t, step


def assert_same_state(
    params: list[Tensor], optimizer: zenflow.ZenFlowAdamW, oracle: Oracle
) -> None:
    saved = optimizer.state_dict()["state"]
    assert len(saved) == sum(p.count > 0 for p in oracle.params)
    for number, tensors in saved.items():
        exp_avg, exp_avg_sq = oracle.moments()[number]
        assert same_bits(tensors["exp_avg"], exp_avg), number
        assert same_bits(tensors["exp_avg_sq"], exp_avg_sq), number
        assert tensors["step"] == oracle.params[number].count
        master = oracle.masters()[number]
        if "master" in tensors:
            assert master is not None
            assert same_bits(tensors["master"], master), number


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also tells NaN from NaN and -0.0 from 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))
