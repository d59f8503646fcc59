"""Squared gradient norms of every column in every step of a run with AdamW."""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.convergence.settings import TASKS, digest
from benchmarks.convergence.tasks.base import Task
from zenflow.core.selection import channel_energy

ELEMENTS_AT = (1, 10, 30, 100, 200)
"""Steps whose elements are looked at one by one as well."""
ELEMENT_SHARES = (0.01, 0.05, 0.1)
_LAYER_NUMBER = re.compile(r"\.\d+\.")


class Recorded(NamedTuple):
    """One run.

    Attributes:
        columns: for each weight of two dimensions its column energies, fp32 ``[steps, C]``.
        elements: for each weight ``{step: shares}``, the shares of all energy that the largest 1%, 5%
            and 10% of its single elements hold.
    """

    columns: dict[str, Tensor]
    elements: dict[str, dict[int, list[float]]]


def kind_of(name: str) -> str:
    """The layer type of a weight: its name without the number of its layer and common prefixes."""
    short = _LAYER_NUMBER.sub(".", name).removesuffix(".weight")
    for prefix in ("model.layers.", "model.", "encoder.encoder.layer.", "encoder."):
        short = short.removeprefix(prefix)
    return short


def record(task: Task, cache: Path) -> Recorded:
    """Train once at the middle learning rate, seed 0, or read what an earlier call has left."""
    name = task.settings.name
    path = cache / f"energies_{name}_{digest(TASKS[name].identity)}.pt"
    if path.exists():
        return Recorded(*torch.load(path))
    recorded = _train(task)
    torch.save(tuple(recorded), path)
    return recorded


def _train(task: Task) -> Recorded:
    settings = task.settings
    model = task.model(0).train()
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2 and p.shape[1] >= 64}
    columns: dict[str, list[Tensor]] = {name: [] for name in weights}
    elements: dict[str, dict[int, list[float]]] = {name: {} for name in weights}
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.middle, weight_decay=settings.weight_decay
    )
    torch.manual_seed(0)
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.middle * settings.lr_factor(step)
        task.loss(model, task.batch(0, step)).backward()
        for name, weight in weights.items():
            columns[name].append(channel_energy(weight.grad))
            if step in ELEMENTS_AT:
                elements[name][step] = top_shares(weight.grad.square().flatten())
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    return Recorded({name: torch.stack(rows) for name, rows in columns.items()}, elements)


def top_shares(energy: Tensor) -> list[float]:
    """Shares of the sum that the largest 1%, 5% and 10% of a vector hold."""
    ordered = energy.double().sort(descending=True).values
    total = ordered.sum().item() or 1.0
    return [
        ordered[: max(1, round(share * len(ordered)))].sum().item() / total
        for share in ELEMENT_SHARES
    ]
