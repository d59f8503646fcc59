"""The selection log: what an optimizer records of its channels, one JSON object a line.

::

    {"zenflow": 1, "step": 0, "topk_ratio": 0.1}                 a run begins behind this step
    {"step": 17, "update_interval": 2}                           S, whenever it changes
    {"step": 17, "weight": "h.0.q.weight", "channels": 896, ...} a scoring, see :class:`Scoring`

A run that goes on from an earlier step appends; what it does anew counts, what was written for those
steps before does not.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = 1
SHARES = (0.01, 0.05, 0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """One weight's channels by the gradient of one step.

    Attributes:
        shares: of the squared gradient norm, in the top 1%, 5% and 10% of channels.
        chosen: the channels selected, bit ``c`` for channel ``c``.
        captured: share of the squared norm in them.
        before: the step of the choice before; None for a first one.
        captured_before: what that choice captures of this gradient.
    """

    step: int
    weight: str
    channels: int
    shares: tuple[float, float, float]
    chosen: int
    captured: float
    before: int | None = None
    captured_before: float | None = None


@dataclass(slots=True)
class SelectionLog:
    """A log that was read.

    Attributes:
        topk_ratio: of the last run in it.
        scorings: in the order of their steps.
        update_intervals: ``(first step, S)``.
        num_unreadable: lines that were cut off.
    """

    topk_ratio: float
    scorings: list[Scoring] = field(default_factory=list)
    update_intervals: list[tuple[int, int]] = field(default_factory=list)
    num_unreadable: int = 0


def score_energy(energy_C: Tensor, chosen: Tensor, before: Tensor | None) -> dict[str, Any] | None:
    """What :class:`Scoring` says of one gradient's channel energies, fp32 ``[C]`` on the host.

    Args:
        chosen: channels selected by it, int64 ``[k]``.
        before: those of the choice before.

    Returns:
        None for energies that are all zero, or too large to add.
    """
    energy = energy_C.double()
    total = energy.sum().item()
    if not 0 < total < math.inf:
        return None
    tops = [max(1, round(share * len(energy))) for share in SHARES]
    ordered = energy.topk(max(tops)).values.cumsum(0)
    bits = torch.zeros(-(-len(energy) // 8) * 8, dtype=torch.uint8)
    bits[chosen] = 1
    packed = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    row = {
        "channels": len(energy),
        "shares": [_rounded(ordered[top - 1].item() / total) for top in tops],
        "captured": _rounded(energy[chosen].sum().item() / total),
        "chosen": f"{int.from_bytes(bytes(packed.tolist()), 'little'):x}",
    }
    if before is not None:
        row["captured_before"] = _rounded(energy[before].sum().item() / total)
    return row


def parse(lines: Iterable[str]) -> SelectionLog:
    """Read a log.

    Raises:
        ValueError: if it is none, or of a newer layout.
    """
    log: SelectionLog | None = None
    scorings: dict[tuple[int, str], Scoring] = {}
    intervals: dict[int, int] = {}
    unreadable = 0
    for line in filter(None, map(str.strip, lines)):
        row = _read(line)
        if isinstance(row, _Head):
            if row.zenflow != VERSION:
                raise ValueError(f"its layout is {row.zenflow}, and {VERSION} is known here")
            scorings = {key: value for key, value in scorings.items() if key[0] <= row.step}
            intervals = {key: value for key, value in intervals.items() if key <= row.step}
            log = SelectionLog(topk_ratio=row.topk_ratio)
        elif isinstance(row, Scoring):
            scorings[row.step, row.weight] = row
        elif row is not None:
            intervals[row.step] = row.update_interval
        else:
            unreadable += 1
    if log is None:
        raise ValueError("it is no selection log")
    log.scorings = [scorings[key] for key in sorted(scorings)]
    log.update_intervals = sorted(intervals.items())
    log.num_unreadable = unreadable
    return log


class _Head(NamedTuple):
    zenflow: int
    step: int
    topk_ratio: float


class _Interval(NamedTuple):
    step: int
    update_interval: int


def _read(line: str) -> _Head | _Interval | Scoring | None:
    """One line; None if it is cut off or something else."""
    try:
        row = json.loads(line)
        if "zenflow" in row:
            head = _Head(**row)
            return (
                head
                if _are(int, head.zenflow, head.step) and _are_shares(row["topk_ratio"])
                else None
            )
        if "weight" not in row:
            interval = _Interval(**row)
            return interval if _are(int, *interval) else None
        row["chosen"] = int(row["chosen"], 16)
        scoring = Scoring(**{**row, "shares": tuple(row["shares"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return scoring if _is_sound(scoring) else None


def _is_sound(scoring: Scoring) -> bool:
    before, held = scoring.before, scoring.captured_before
    return (
        _are(str, scoring.weight)
        and _are(int, scoring.step, scoring.channels, 0 if before is None else before)
        and 0 < scoring.chosen < 1 << scoring.channels
        and len(scoring.shares) == len(SHARES)
        and _are_shares(*scoring.shares, scoring.captured, 0 if held is None else held)
    )


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)


def _are_shares(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and 0 <= value <= 1.001 for value in values)


def _rounded(value: float) -> float:
    return round(value, 5)
