"""What a selection log says: pure functions of it."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from zenflow.core.selection_log import Scoring, SelectionLog

ALL = "all"
_MAX_POINTS = 40
_Kept = dict[int, tuple[float, int]]
"""Of one weight, by lag: the shares behind :attr:`Finding.kept` added up, and how many they are."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.[^.]+\.)")
"""Of a layer: inside a name, or ahead of it if a part of the layer follows (``0.weight`` is a layer of its
own kind)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The weights of one layer type.

    Attributes:
        kind: their names with a star for the number of the layer.
        weights: how many there are.
        shares: of the squared gradient norm in the top 1%, 5% and 10% of channels, mean.
        selected: share of channels that is selected.
        captured: share of the squared norm in newly selected channels, mean.
        captured_before: in those of the choice before, by the same gradients; None if there is none.
        lag: mean steps between two choices; None if there is one.
        kept: share of a choice that is chosen again, by steps between them (powers of 2).
        skew: ``(step, share in the top 10%)`` over training.
    """

    kind: str
    weights: int
    shares: tuple[float, float, float]
    selected: float
    captured: float
    captured_before: float | None
    lag: float | None
    kept: dict[int, float]
    skew: list[tuple[float, float]]


def findings(log: SelectionLog) -> list[Finding]:
    """One for all weights, then one for each layer type, in the order of the names.

    Raises:
        ValueError: if nothing was scored.
    """
    if not log.scorings:
        raise ValueError(
            "no channels were scored: the log has no step, or topk_ratio selects none or all"
        )
    names = {scoring.weight for scoring in log.scorings}
    kinds = kinds_of(names)
    by_kind: dict[str, list[Scoring]] = defaultdict(list)
    runs: dict[str, list[Scoring]] = defaultdict(list)
    for scoring in log.scorings:
        by_kind[kinds[scoring.weight]].append(scoring)
        runs[scoring.weight].append(scoring)
    kept = {weight: _kept(run) for weight, run in runs.items()}
    found = [_finding(kind, by_kind[kind], kept) for kind in sorted(by_kind)]
    return [_finding(ALL, log.scorings, kept), *found]


def kinds_of(names: Iterable[str]) -> dict[str, str]:
    """The layer type of each weight: its name with a star for each number, without what all share at
    the front and without ``.weight``. Where layers begin, nothing more is left out."""
    kinds = {name: _NUMBER.sub("*", _shown(name)).removesuffix(".weight") for name in names}
    parts = [kind.split(".") for kind in set(kinds.values())]
    front = 0
    while all(len(p) > front + 1 and p[front] == parts[0][front] for p in parts):
        if len(parts) == 1 or "*" in parts[0][front : front + 2]:
            break
        front += 1
    return {name: ".".join(kind.split(".")[front:]) for name, kind in kinds.items()}


def _shown(name: str) -> str:
    """What a terminal and an SVG can show of it."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _finding(kind: str, scorings: Sequence[Scoring], kept: Mapping[str, _Kept]) -> Finding:
    runs: dict[str, list[Scoring]] = defaultdict(list)
    for scoring in scorings:
        runs[scoring.weight].append(scoring)
    again = [s for s in scorings if s.captured_before is not None]
    lags = [b.step - a.step for run in runs.values() for a, b in itertools.pairwise(run)]
    top1, top5, top10 = (fmean(s.shares[i] for s in scorings) for i in range(3))
    return Finding(
        kind=kind,
        weights=len(runs),
        shares=(top1, top5, top10),
        selected=fmean(s.chosen.bit_count() / s.channels for s in scorings),
        captured=fmean(s.captured for s in scorings),
        captured_before=fmean(s.captured_before or 0.0 for s in again) if again else None,
        lag=fmean(lags) if lags else None,
        kept=_means([kept[weight] for weight in runs]),
        skew=_over_time(scorings),
    )


def _means(kept: Sequence[_Kept]) -> dict[int, float]:
    lags = sorted({lag for each in kept for lag in each})
    found = {lag: [each[lag] for each in kept if lag in each] for lag in lags}
    return {
        lag: math.fsum(total for total, _ in each) / sum(num for _, num in each)
        for lag, each in found.items()
    }


def _kept(run: Sequence[Scoring]) -> _Kept:
    kept: _Kept = {}
    steps = [scoring.step for scoring in run]
    lag = 1
    while lag <= steps[-1] - steps[0]:
        shares = []
        place = 0
        for early in run:
            while place < len(steps) and steps[place] < early.step + lag:
                place += 1
            later = _nearest(run, place, early.step + lag)
            if lag / 1.5 < later.step - early.step < lag * 1.5:
                both = (early.chosen & later.chosen).bit_count()
                shares.append(both / max(1, early.chosen.bit_count()))
        if shares:
            kept[lag] = math.fsum(shares), len(shares)
        lag *= 2
    return kept


def _nearest(run: Sequence[Scoring], place: int, step: int) -> Scoring:
    """To ``step``, which the scorings before ``place`` lie before; the earlier of two as near."""
    if place == len(run):
        return run[-1]
    if place and step - run[place - 1].step <= run[place].step - step:
        return run[place - 1]
    return run[place]


def _over_time(scorings: Sequence[Scoring]) -> list[tuple[float, float]]:
    first, last = scorings[0].step, scorings[-1].step
    width = max(1.0, (last - first + 1) / _MAX_POINTS)
    bins: dict[int, list[Scoring]] = defaultdict(list)
    for scoring in scorings:
        bins[int((scoring.step - first) / width)].append(scoring)
    return [
        (fmean(s.step for s in part), fmean(s.shares[2] for s in part))
        for _, part in sorted(bins.items())
    ]
