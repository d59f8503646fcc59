"""Random sequences of everything that a user does, against the oracle; and that the search can find."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sequences
from sequences import CALLS, draw, report

from zenflow.kernels import reference
from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.weight import Weight

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = range(60)
ROOT = Path(__file__).parents[2]


@pytest.mark.covers("all of it in any order")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_sequence(number: int) -> None:
    found = report(draw(number))
    assert found is None, f"\n{found}"


def test_the_sequences_have_every_call_and_way() -> None:
    drawn = [call for number in NUMBERS for call in draw(number).calls]
    names = Counter(call.name for call in drawn)
    assert names.keys() == CALLS.keys()
    assert min(names.values()) >= 20
    ways = {(name, value) for call in drawn for name, value in call.arguments.items()}
    for name, values in {
        "how": ["in place", "data", "memory", "load_state_dict"],
        "into": ["same", "new"],
        "weights": ["first", "after", "kept"],
        "between": ["edit", "synchronize", "look", "save"],
        "bad": [True],
        "dropped": [True],
        "stream": [True, False],
        "linked": [True, False],
    }.items():
        assert {(name, value) for value in values} <= ways


def loses_saved_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPipeline, "put_slot", lambda *arguments: None)


def sees_no_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weight, "changed_outside", lambda *arguments, **rest: False)


def publishes_without_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    start_sweep = HostPipeline.start_sweep
    monkeypatch.setattr(
        HostPipeline,
        "start_sweep",
        lambda pipeline, segment, _: start_sweep(pipeline, segment, 0.0),
    )


FAULTS = [loses_saved_slots, sees_no_edits, publishes_without_lookahead]


@pytest.mark.parametrize("inject", FAULTS)
def test_a_fault_is_found_and_the_sequence_shrunk(
    inject: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        inject(broken)
        failing = next(s for s in map(draw, NUMBERS) if s.error() is not None)
        shrunk = sequences.shrink(failing)
        assert len(shrunk.calls) <= 8 < len(failing.calls)
        assert shrunk.error() is not None
    assert shrunk.error() is None


NEWEST_FIRST = """\
from zenflow.kernels import reference

_sweep = reference.sweep


def _newest_first(p, m, v, grads, *rest, **options):
    _sweep(p, m, v, list(reversed(grads)), *rest, **options)


reference.sweep = _newest_first
"""


def test_the_printed_script_shows_the_fault_and_passes_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ZENFLOW_KERNEL", "torch")
    sweep = reference.sweep
    with monkeypatch.context() as broken:
        broken.setattr(
            reference,
            "sweep",
            lambda p, m, v, grads, *rest, **options: sweep(
                p, m, v, list(reversed(grads)), *rest, **options
            ),
        )
        printed = next(filter(None, (report(draw(number), seconds=3) for number in NUMBERS)))
    error, _, script = printed.partition("\n\n")
    assert "Error" in error
    exec(compile(script, "script.py", "exec"), {})
    file = tmp_path / "script.py"
    file.write_text(NEWEST_FIRST + script)
    ended = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "AssertionError" in ended.stderr
