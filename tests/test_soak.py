"""What `make soak` would call growth. The long runs themselves are not part of the suite."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
FLAT = [300 * MIB + 5 * MIB * (step % 7 == 0) for step in range(90)]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import soak

    yield soak
    for name in ("soak", "kernel"):
        sys.modules.pop(name, None)


GROWTH: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int], tuple[float, float]]] = {
    "resident bytes": ([x + MIB * (i // 5) for i, x in enumerate(FLAT)], [4], [4], (5.0, 2.0)),
    "threads": (FLAT, [4] * 50 + [5] * 40, [4], (5.0, 2.0)),
    "file descriptors": (FLAT, [4], [4] * 30 + [5] * 60, (5.0, 2.0)),
    "held-out loss": (FLAT, [4], [4], (2.0, float("nan"))),
}


@pytest.mark.parametrize("what", [*GROWTH, "nothing"])
def test_growth_is_found_and_what_comes_and_goes_is_not(soak: Any, what: str) -> None:
    resident, threads, descriptors, losses = GROWTH.get(what, (FLAT, [4], [4], (5.0, 2.0)))
    whole = [list(each) * (90 // len(each)) for each in (resident, threads, descriptors)]
    result = soak.Result(soak.Samples(*whole), 16 * MIB, 1.0, {}, losses)
    failures = result.failures()
    assert [what in failure for failure in failures] == [True] * (what != "nothing")
