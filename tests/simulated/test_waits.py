"""No wait in the runtime is superfluous: without it, some run of the simulation is wrong.

The waits are found in the source, so a new one is tested as it is written.
"""

import io
import logging
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest
from scenarios import EARLY, SCENARIOS, expected, logged, same, simulated
from test_stall import assert_steady, per_layer, train
from torch import Tensor
from waits import OWN_FUNCTIONS, OWN_METHODS, TICKET_METHODS, Wait, find_waits, modules, without

from zenflow.testing.simulated import Policy, policies

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.usefixtures("no_log"),
]

POLICIES = [
    Policy(),
    Policy(compute="early"),
    Policy(links="loose"),
    Policy(compute="early", links="loose", workers="loose"),
    *policies(),
    *(Policy(compute="random", links="random", workers="random", seed=s) for s in range(4)),
]

TIMED = "self.platform.device.mark().wait()"
"""The wait for compute before a step is timed. Right numbers do not need it, because the check for
finite gradients waits as well; without it compute would pass for the step's own overhead."""

LOGGED = "energies = scored and scored.energies"
"""The wait that only the selection log needs: without it the log says something else."""

NEEDLESS = {
    "while self._job is not None and (not self._finished.wait(_LIVENESS_CHECK_S)):": (
        "real threads, which the simulation replaces; tests/runtime has their tests"
    ),
    "writer.begun(self.name, step, platform.device.read(energies), chosen)": (
        "the read of the choice has waited for the same work; this one is there to copy"
    ),
}
"""Statements whose wait no simulated run needs, and why."""

FIRST = {
    "saving": ("resume", "resume bf16"),
    "loading": ("resume", "resume bf16"),
    "Weight.checksum": ("resume", "resume bf16"),
    "Segment.assemble": ("resume",),
    "Segment.restore": ("resume",),
    "settle": ("resume",),
    "checksum": ("resume",),
    "Resident.changed_outside": ("resume bf16",),
    "_finish": ("edits",),
    "_lost_print": ("edits",),
    "captured": ("streaming over a slow link", "streaming"),
    "captured_parts": ("streaming large gradients",),
    "_hold:done": ("streaming over a slow link", "streaming in little room"),
    "release_copied:done": ("streaming over a slow link", "streaming in little room"),
    "release_copied:wait": ("streaming in little room",),
    "publish_in_flight": ("synchronous", "no lookahead"),
    "_n": ("skips",),
}
"""Where a wait's name has such a part, the scenarios that are likely to miss it."""


@pytest.fixture
def no_log() -> Iterator[None]:
    """Broken runs have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def right(name: str) -> list[list[Tensor]]:
    return expected(SCENARIOS[name])


def find_failure(wait: Wait) -> str | None:
    """The first run that goes wrong, and how; None if all of them are right."""
    likely = [name for part, names in FIRST.items() if part in str(wait) for name in names]
    for name in dict.fromkeys([*likely, *SCENARIOS]):
        for policy in POLICIES:
            try:
                seen = simulated(SCENARIOS[name], policy).seen
            except Exception as error:
                return f"{name}, {policy}: {error!r}"
            if not same(seen, right(name)):
                return f"{name}, {policy}: other numbers"
    return None


def find_wrong_time() -> str | None:
    training = train(per_layer(compute_s=4.0, sweep_s=1.0), update_interval=1)
    try:
        assert_steady(training, stall_s=4.0, compute_s=4.0)
    except AssertionError as error:
        return str(error)
    return None


def find_wrong_log() -> str | None:
    for policy in (Policy(), Policy(links="loose")):
        for name in ("plain", "streaming"):
            if logged(SCENARIOS[name], policy) != logged(SCENARIOS[name], EARLY):
                return f"{name}, {policy}: another log"
    return None


def test_nothing_fails_as_it_is() -> None:
    assert find_wrong_time() is None
    assert find_wrong_log() is None
    assert all(
        same(simulated(SCENARIOS[name], policy).seen, right(name))
        for name in ("plain", "streaming")
        for policy in POLICIES
    )


@pytest.mark.covers("order of copies and compute")
@pytest.mark.parametrize("wait", find_waits(), ids=str)
def test_without_it_a_run_goes_wrong(wait: Wait) -> None:
    for statement, reason in NEEDLESS.items():
        if wait.statement.startswith(statement):
            pytest.skip(reason)
    with without(wait):
        if wait.statement == TIMED:
            failure = find_wrong_time()
        elif wait.statement.startswith(LOGGED):
            failure = find_wrong_log()
        else:
            failure = find_failure(wait)
    assert failure is not None, f"nothing needs the wait in: {wait.statement}"


def test_the_exceptions_exist() -> None:
    statements = [wait.statement for wait in find_waits()]
    for exception in (TIMED, LOGGED, *NEEDLESS):
        assert any(statement.startswith(exception) for statement in statements)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_every_call_that_waits_is_found(module: ModuleType) -> None:
    """Counted once more, by the words of the source."""
    found = Counter(wait.call for wait in find_waits() if wait.module == module.__name__)
    assert module.__file__ is not None
    with open(module.__file__) as file:
        words = [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(file.read()).readline)
            if token.type in (tokenize.NAME, tokenize.OP)
        ]
    calls = Counter(
        word
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
        if after == "("
        and (
            (before == "." and word in TICKET_METHODS + OWN_METHODS)
            or (before not in (".", "def") and word in OWN_FUNCTIONS)
        )
    )
    assert found == calls


def test_code_is_put_back() -> None:
    wait = find_waits()[0]
    before = right("plain")
    with without(wait):
        pass
    assert same(simulated(SCENARIOS["plain"], Policy()).seen, before)
