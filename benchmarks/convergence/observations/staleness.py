"""Error against staleness: a noisy quadratic whose answer is known, trained by the product."""

import itertools
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence.variants import Variant, VariantAdamW

DIMENSION, ROWS = 64, 32
STEPS, TAIL = 600, 200
INTERVALS = (1, 2, 4, 8, 16)
LRS = (2.5e-3, 5e-3, 1e-2, 2e-2)
SEEDS = 3
WAYS: dict[str, tuple[dict[str, Any], Variant]] = {
    "replay, staggered, lookahead": ({}, Variant()),
    "replay, staggered": ({"lookahead": False}, Variant()),
    "replay, together": ({"lookahead": False}, Variant(together=True)),
    "window mean, together": (
        {"lookahead": False, "update_rule": "accumulate"},
        Variant(together=True),
    ),
}


class Quadratic(nn.Module):
    """``sum(h * (w - target)**2) / 2`` with curvatures from 1 to 100, and noisy gradients.

    Four weights, so that windows can be staggered.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            torch.randn(ROWS, DIMENSION, generator=self.generator) for _ in range(4)
        )
        self.curvature = torch.logspace(0, 2, DIMENSION)[torch.randperm(DIMENSION)]

    def loss(self) -> Tensor:
        """The true loss, per element."""
        total = sum((self.curvature * w.square()).sum() / 2 for w in self.weights)
        return total / (4 * ROWS * DIMENSION)

    def noisy_gradients(self) -> None:
        for w in self.weights:
            noise = torch.randn(w.shape, generator=self.generator) * self.curvature.sqrt()
            w.grad = self.curvature * w.detach() + noise


def tail_loss(optimizer_of: Any, lr: float, seed: int) -> float:
    """Mean true loss, at the weights that a forward pass sees, over the last steps."""
    torch.manual_seed(seed)
    problem = Quadratic(seed)
    optimizer = optimizer_of(problem.parameters(), lr)
    losses = []
    for step in range(STEPS):
        problem.noisy_gradients()
        optimizer.step()
        if step >= STEPS - TAIL:
            losses.append(problem.loss().item())
    if hasattr(optimizer, "close"):
        optimizer.close()
    return mean(losses)


def observe() -> list[dict[str, Any]]:
    """Loss above AdamW's for each way, learning rate and update interval."""
    rows = []
    for lr in LRS:
        base = mean(tail_loss(_adamw, lr, seed) for seed in range(SEEDS))
        for (name, (config, variant)), interval in itertools.product(WAYS.items(), INTERVALS):
            config = {"topk_ratio": 0.0, "update_interval": interval, "host_threads": 1, **config}

            def stale(params: Any, lr: float, config: Any = config, variant: Any = variant) -> Any:
                return VariantAdamW(params, lr, weight_decay=0.0, config=config, variant=variant)

            loss = mean(tail_loss(stale, lr, seed) for seed in range(SEEDS))
            rows.append(
                {
                    "way": name,
                    "lr": lr,
                    "interval": interval,
                    "adamw": round(base, 6),
                    "excess": round(loss - base, 6),
                }
            )
    return rows


def _adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, weight_decay=0.0)
