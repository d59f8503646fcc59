"""The runtime on the simulated machine equals the oracle, bit for bit, whatever is early or late."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from scenarios import (
    EARLY,
    RATES,
    SCENARIOS,
    SHAPES,
    Scenario,
    expected,
    logged,
    same,
    simulated,
)

from zenflow.testing.simulated import Policy, policies

pytestmark = pytest.mark.usefixtures("one_thread")

RANDOM = [Policy(compute="random", links="random", workers="random", seed=s) for s in range(4)]
POLICIES = [*policies(("early", "late", "loose")), *RANDOM]
SHARED = [Policy(workers=workers) for workers in ("early", "late", "loose", "random")]
LATE = Policy()

CONFIGS = [
    {
        "update_interval": interval,
        "topk_ratio": topk_ratio,
        "lookahead": lookahead,
        "update_rule": rule,
        "overlap_step": overlap,
        "select_interval": 2 if overlap else 3,
    }
    for interval, topk_ratio, lookahead, rule, overlap in itertools.product(
        (1, 2, 4), (0, 0.1, 0.5), (True, False), ("replay", "accumulate"), (True, False)
    )
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_config(number: int) -> None:
    """Each under two policies of its own beside the latest, and once with shared memory."""
    scenario = Scenario(
        events="sspsxssysps" + "s" * 4, config=CONFIGS[number], num_workers=1 + number % 2
    )
    right = expected(scenario)
    for policy in (LATE, POLICIES[number % 18], POLICIES[-1 - number % 7]):
        assert same(simulated(scenario, policy).seen, right), policy
    shared = SHARED[number % 4]
    assert same(simulated(scenario, shared, shared=True).seen, right), shared


@pytest.mark.covers("order of copies and compute")
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_policy(name: str) -> None:
    scenario = SCENARIOS[name]
    right = expected(scenario)
    for policy in POLICIES:
        assert same(simulated(scenario, policy).seen, right), policy
    for policy in SHARED:
        assert same(simulated(scenario, policy, shared=True).seen, right), policy


@pytest.mark.parametrize("name", ["plain", "skips", "resume", "streaming", "accumulate"])
def test_the_selection_log_is_the_same_however_late_copies_are(name: str) -> None:
    right = logged(SCENARIOS[name], EARLY, shared=True)
    assert len(right.scorings) > 4
    for policy in POLICIES:
        log = logged(SCENARIOS[name], policy)
        assert {(s.step, s.weight, s.chosen) for s in log.scorings} == {
            (s.step, s.weight, s.chosen) for s in right.scorings
        }, policy
        assert log == logged(SCENARIOS[name], EARLY), policy


def test_a_run_is_the_same_twice() -> None:
    runs = [simulated(SCENARIOS["plain"], RANDOM[0]) for _ in range(2)]
    assert same(runs[0].seen, runs[1].seen)
    assert runs[0].stats == runs[1].stats
    assert runs[0].periods_s == runs[1].periods_s


def random_scenario(seed: int) -> Scenario:
    draw = random.Random(seed)
    streaming = draw.random() < 0.4
    weights = {"s": 60, "p": 12, "x": 4, "y": 4, "h": 0 if streaming else 2}
    weights |= {"r": 6, "e": 3}
    events = "".join(draw.choices(list(weights), weights=list(weights.values()), k=24))
    config = {
        "update_interval": draw.choice([1, 2, 3, 4]),
        "topk_ratio": draw.choice([0, 0.1, 0.25, 0.5, 1]),
        "select_interval": draw.choice([1, 2, 3, "auto"]),
        "update_rule": draw.choice(["replay", "accumulate"]),
        "lookahead": draw.random() < 0.5,
        "preview": draw.random() < 0.8,
        "overlap_step": draw.random() < 0.8,
        "full_warm_up_rounds": draw.choice([0, 0, 3]),
        "stream_gradients": streaming,
        "max_grad_norm": draw.choice([None, 5.0]),
    }
    return Scenario(
        events=events,
        config=config,
        dtype=draw.choice([torch.float32, torch.float32, torch.bfloat16]),
        shapes=draw.choice([SHAPES, ((8, 16),) * 4, ((40, 8), (8,), (), (70, 3), (3, 40, 5))]),
        num_workers=draw.choice([1, 2]),
        rates=replace(RATES, to_host_bytes_per_s=draw.choice([100.0, 1e4])),
        max_streaming_bytes=draw.choice([None, 500]),
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_runs(seed: int) -> None:
    scenario = random_scenario(seed)
    right = expected(scenario)
    draw = random.Random(seed)
    kinds = ("early", "late", "loose", "random")
    for shared in (False, False, True):
        policy = Policy(
            compute=draw.choice(("early", "late", "random")),
            links=draw.choice(kinds),
            workers=draw.choice(kinds),
            seed=seed,
        )
        assert same(simulated(scenario, policy, shared=shared).seen, right), (policy, shared)
