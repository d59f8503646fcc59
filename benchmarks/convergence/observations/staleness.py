"""Error against staleness: two problems whose answer is known, trained by the product."""

import itertools
from collections.abc import Callable
from statistics import mean
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.convergence.variants import Variant, VariantAdamW

STEPS, TAIL = 600, 300
INTERVALS = (1, 2, 4, 8, 16)
SEEDS = 3
_EXACT = {"preview": False}
WAYS: dict[str, tuple[dict[str, Any], Variant]] = {
    "window mean, together": (
        {**_EXACT, "lookahead": False, "update_rule": "accumulate"},
        Variant(together=True),
    ),
    "replay, together": ({**_EXACT, "lookahead": False}, Variant(together=True)),
    "replay, staggered": ({**_EXACT, "lookahead": False}, Variant()),
    "and lookahead": (_EXACT, Variant()),
    "and previews": ({}, Variant()),
}


class Problem(Protocol):
    """Begins at its minimum: what is measured is the floor that noise holds the loss at, and how far
    staleness lifts it."""

    def parameters(self) -> Any: ...

    def noisy_gradients(self) -> None:
        """Give every parameter its gradient on one batch."""
        ...

    def loss(self) -> float:
        """Above the minimum, without noise."""
        ...


class Quadratic(nn.Module):
    """``w H w / 2`` for each row ``w`` over four weights side by side, with noisy gradients.

    The curvatures go from 1 to 100 along directions that all weights share, so that it matters which
    of them move together.
    """

    dimension, rows = 64, 32

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.zeros(self.rows, self.dimension) for _ in range(4))
        size = 4 * self.dimension
        directions = torch.linalg.qr(torch.randn(size, size, generator=self.generator))[0]
        curvatures = torch.logspace(0, 2, size)
        self.hessian = (directions * curvatures) @ directions.T
        self.noise = directions * curvatures.sqrt()

    def loss(self) -> float:
        rows = torch.cat(list(self.weights), 1).detach()
        return ((rows @ self.hessian) * rows).sum().item() / (2 * self.rows)

    def noisy_gradients(self) -> None:
        rows = torch.cat(list(self.weights), 1).detach()
        noise = torch.randn(rows.shape, generator=self.generator) @ self.noise.T
        for weight, grad in zip(
            self.weights, (rows @ self.hessian + noise).chunk(4, 1), strict=True
        ):
            weight.grad = grad.clone()


class Network(nn.Module):
    """A network of two hidden layers that learns what another one of its shape says, with noise; it
    begins as that other one."""

    sizes = (32, 64, 64, 16)
    batch, noise = 32, 0.3

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        pairs = list(itertools.pairwise(self.sizes))
        self.teacher, self.student = (
            nn.Sequential(*itertools.chain(*((nn.Linear(a, b), nn.Tanh()) for a, b in pairs)))[:-1]
            for _ in range(2)
        )
        self.student.load_state_dict(self.teacher.state_dict())
        self.checked = torch.randn(512, self.sizes[0])
        self.generator = torch.Generator().manual_seed(seed)

    def parameters(self, recurse: bool = True) -> Any:
        return self.student.parameters(recurse)

    def loss(self) -> float:
        with torch.no_grad():
            return (self.student(self.checked) - self.teacher(self.checked)).square().mean().item()

    def noisy_gradients(self) -> None:
        inputs = torch.randn(self.batch, self.sizes[0], generator=self.generator)
        with torch.no_grad():
            answers = self.teacher(inputs)
            answers += self.noise * torch.randn(answers.shape, generator=self.generator)
        (self.student(inputs) - answers).square().mean().backward()


PROBLEMS: dict[str, tuple[Callable[[int], Any], tuple[float, ...]]] = {
    "quadratic": (Quadratic, (1e-3, 3e-3, 1e-2)),
    "network": (Network, (1e-3, 3e-3)),
}


def tail_loss(problem: Problem, optimizer_of: Any, lr: float, seed: int) -> float:
    """Mean true loss, at the weights that a forward pass sees, over the last steps."""
    torch.manual_seed(seed)
    optimizer = optimizer_of(problem.parameters(), lr)
    losses = []
    for step in range(STEPS):
        problem.noisy_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS - TAIL:
            losses.append(problem.loss())
    if hasattr(optimizer, "close"):
        optimizer.close()
    return mean(losses)


def observe() -> list[dict[str, Any]]:
    """Loss above AdamW's for each problem, way, learning rate and update interval."""
    rows = []
    seeds = range(SEEDS)
    for name, (make, lrs) in PROBLEMS.items():
        for lr in lrs:
            base = mean(tail_loss(make(seed), _adamw, lr, seed) for seed in seeds)
            for (way, (config, variant)), interval in itertools.product(WAYS.items(), INTERVALS):
                config = {
                    "topk_ratio": 0.0,
                    "update_interval": interval,
                    "host_threads": 1,
                    **config,
                }

                def stale(p: Any, lr: float, config: Any = config, variant: Any = variant) -> Any:
                    return VariantAdamW(p, lr, weight_decay=0.0, config=config, variant=variant)

                loss = mean(tail_loss(make(seed), stale, lr, seed) for seed in seeds)
                rows.append(
                    {
                        "problem": name,
                        "way": way,
                        "lr": lr,
                        "interval": interval,
                        "adamw": round(base, 7),
                        "excess": round(loss - base, 7),
                    }
                )
    return rows


def _adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, weight_decay=0.0)
