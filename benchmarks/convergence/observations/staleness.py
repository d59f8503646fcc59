"""Error against staleness: a noisy quadratic whose answer is known, trained by the product."""

import itertools
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.variants import Variant, VariantAdamW

DIMENSION, ROWS = 64, 32
STEPS, TAIL = 600, 300
INTERVALS = (1, 2, 4, 8, 16)
LRS = (3e-4, 1e-3, 3e-3, 1e-2)
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
    """``w H w / 2`` for each row ``w`` over four weights side by side, with noisy gradients.

    The curvatures go from 1 to 100 along directions that all weights share, so that it matters which
    of them move together. It begins at its minimum: what is measured is the floor that noise holds
    the loss at, and how far staleness lifts it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.zeros(ROWS, DIMENSION) for _ in range(4))
        size = 4 * DIMENSION
        directions = torch.linalg.qr(torch.randn(size, size, generator=self.generator))[0]
        curvatures = torch.logspace(0, 2, size)
        self.hessian = (directions * curvatures) @ directions.T
        self.noise = directions * curvatures.sqrt()

    def loss(self) -> float:
        """The true loss, per row."""
        rows = torch.cat(list(self.weights), 1).detach()
        return ((rows @ self.hessian) * rows).sum().item() / (2 * ROWS)

    def noisy_gradients(self) -> None:
        rows = torch.cat(list(self.weights), 1).detach()
        noise = torch.randn(rows.shape, generator=self.generator) @ self.noise.T
        for weight, grad in zip(
            self.weights, (rows @ self.hessian + noise).chunk(4, 1), strict=True
        ):
            weight.grad = grad.clone()


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
            losses.append(problem.loss())
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
