"""Skew, stability and fidelity: pure functions of recorded column energies."""

from collections import defaultdict
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.observations.energies import (
    ELEMENTS_AT,
    Recorded,
    kind_of,
    top_shares,
)
from zenflow.core.selection import num_selected

RATIO = 0.1
LAGS = (1, 4, 16, 64)
OVERLAP_LAGS = (1, 10, 100)
SMOOTHING = (0.0, 0.9, 0.98)
"""Decay of an average of the scores over steps; 0 is one batch's score."""


def skew(recorded: Recorded) -> dict[str, Any]:
    """Share of the energy in the top 1%, 5% and 10% of columns, by layer type and step."""
    found: dict[str, dict[int, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for name, energy in recorded.columns.items():
        for step in ELEMENTS_AT:
            if step <= len(energy):
                shares = top_shares(energy[step - 1])
                found[kind_of(name)][step].append(shares)
                found["all"][step].append(shares)
    return {
        kind: {str(step): _means(rows) for step, rows in steps.items()}
        for kind, steps in found.items()
    }


def stability(recorded: Recorded) -> dict[str, Any]:
    """Share of the selected set that is still selected some steps later, by smoothing and lag."""
    return {
        f"{decay:g}": {
            str(lag): _rounded(
                mean(_overlaps(smoothed(energy, decay), lag) for energy in _all(recorded))
            )
            for lag in OVERLAP_LAGS
        }
        for decay in SMOOTHING
    }


def fidelity(recorded: Recorded) -> dict[str, Any]:
    """Share of the energy that a selection of 10% holds.

    ``elements``: of single elements; ``columns``: of columns by the step's own gradient, at the same
    steps; ``late``: of columns chosen some steps earlier, by smoothing and lag.
    """
    own = [top_shares(energy[s - 1])[2] for energy in _all(recorded) for s in _steps(energy)]
    single = [shares[2] for steps in recorded.elements.values() for shares in steps.values()]
    return {
        "elements": _rounded(mean(single)),
        "columns": _rounded(mean(own)),
        "late": {
            f"{decay:g}": {
                str(lag): _rounded(
                    mean(_captured(e, smoothed(e, decay), lag) for e in _all(recorded))
                )
                for lag in LAGS
            }
            for decay in SMOOTHING
        },
    }


def smoothed(energy: Tensor, decay: float) -> Tensor:
    """Running average over steps of ``[steps, C]``, bias-corrected."""
    if decay == 0:
        return energy
    rows, average = [], torch.zeros_like(energy[0])
    for step, row in enumerate(energy, 1):
        average = decay * average + (1 - decay) * row
        rows.append(average / (1 - decay**step))
    return torch.stack(rows)


def _overlaps(score: Tensor, lag: int) -> float:
    chosen = _masks(score)
    both = (chosen[lag:] & chosen[:-lag]).sum(1).float()
    return (both / chosen.sum(1)[0]).mean().item()


def _captured(energy: Tensor, score: Tensor, lag: int) -> float:
    held = (energy[lag:] * _masks(score)[:-lag]).sum(1)
    return (held / energy[lag:].sum(1).clamp_min(1e-30)).mean().item()


def _masks(score: Tensor) -> Tensor:
    top = score.topk(num_selected(score.shape[1], RATIO), dim=1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, top, True)


def _all(recorded: Recorded) -> list[Tensor]:
    return list(recorded.columns.values())


def _steps(energy: Tensor) -> list[int]:
    return [step for step in ELEMENTS_AT if step <= len(energy)]


def _means(rows: list[list[float]]) -> list[float]:
    return [_rounded(mean(column)) for column in zip(*rows, strict=True)]


def _rounded(value: float) -> float:
    return round(value, 4)
