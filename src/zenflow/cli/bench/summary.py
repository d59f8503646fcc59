"""Statistics of repeated timings, one definition for every benchmark."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of the values do not exceed, between two linearly."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """What a table shows of many timings, in the timings' unit."""

    count: int
    mean: float
    median: float
    p95: float
    p99: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(
            count=len(values),
            mean=statistics.fmean(values),
            median=statistics.median(values),
            p95=percentile(values, 95),
            p99=percentile(values, 99),
            low=min(values),
            high=max(values),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)
