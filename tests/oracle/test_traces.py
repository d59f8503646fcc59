"""Update intervals that change from step to step: same bits as the oracle, staleness within bound."""

import random
import time
from typing import Any

import pytest
import torch
from runs import assert_same, assert_same_state, grad_like, same_bits
from torch import nn

import zenflow
from zenflow.kernels import reference
from zenflow.runtime.controller import AutoInterval, RecordedInterval
from zenflow.testing.oracle import Oracle

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((40, 24), (24,), (33, 17), (6, 12, 3, 3), (700, 200))
BOUND = 4


def weights() -> list[torch.Tensor]:
    random_ = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random_) for shape in SHAPES]


def build(config: dict[str, Any]) -> tuple[list[nn.Parameter], zenflow.ZenFlowAdamW]:
    params = [nn.Parameter(weight) for weight in weights()]
    base = {"update_interval": "auto", "max_update_interval": BOUND, "select_interval": 3}
    return params, zenflow.ZenFlowAdamW(params, lr=1e-2, config=base | config)


def give(params: list[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    """This step's gradients; each parameter goes without now and then."""
    numbers = torch.Generator().manual_seed(step)
    grads: list[torch.Tensor | None] = [grad_like(param, numbers) for param in params]
    for index in range(len(params)):
        if (step + index) % 6 == 0:
            grads[index] = None
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    return grads


@pytest.mark.parametrize("number", range(16))
def test_any_trace(number: int) -> None:
    choose = random.Random(number)
    trace = [choose.randint(1, BOUND) for _ in range(40)]
    params, optimizer = build(
        {
            "update_rule": choose.choice(["replay", "accumulate"]),
            "lookahead": choose.random() < 0.7,
            "preview": choose.random() < 0.8,
            "topk_ratio": choose.choice([0, 0.1, 0.3]),
            "full_warm_up_rounds": choose.choice([0, 0, 5]),
            "host_threads": choose.choice([1, 3]),
        }
    )
    engine = optimizer._running_engine()
    engine.controller = RecordedInterval(list(enumerate(trace, 1)))
    group = {"params": range(len(params)), "lr": 1e-2}
    oracle = Oracle(weights(), [group], optimizer.config, intervals=trace)
    for step in range(len(trace)):
        grads = give(params, step)
        optimizer.step()
        oracle.step(grads)
        assert_same(step, params, optimizer, oracle)
        assert optimizer.stats.staleness_steps <= BOUND
    assert_same_state(params, optimizer, oracle)
    optimizer.close()


def test_automatic_choices_are_recorded_and_a_recorded_trace_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that becomes slow and then fast again, on the real clock."""
    monkeypatch.setenv("ZENFLOW_KERNEL", "torch")
    sweep = reference.sweep
    slow = True

    def sweep_slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.02 if slow else 0.0)
        sweep(*args, **kwargs)

    monkeypatch.setattr(reference, "sweep", sweep_slowly)
    params, optimizer = build({"host_threads": 1})
    num_steps = 40
    for step in range(num_steps):
        slow = step < 20
        give(params, step)
        optimizer.step()
        time.sleep(0.01)
    monkeypatch.undo()
    controller = optimizer._running_engine().controller
    assert isinstance(controller, AutoInterval)
    recorded = RecordedInterval(controller.trace)
    intervals = [recorded.interval(step) for step in range(1, num_steps + 1)]
    assert len(set(intervals)) > 1

    again, replayed = build({"host_threads": 3})
    replayed._running_engine().controller = recorded
    group = {"params": range(len(params)), "lr": 1e-2}
    oracle = Oracle(weights(), [group], optimizer.config, intervals=intervals)
    for step in range(num_steps):
        oracle.step(give(again, step))
        replayed.step()
    for one, other, expected in zip(params, again, oracle.weights(), strict=True):
        assert same_bits(one.detach(), expected)
        assert same_bits(other.detach(), expected)
    optimizer.close()
    replayed.close()


@pytest.mark.parametrize("rule", ["replay", "accumulate"])
def test_a_smaller_interval_after_a_resume_is_kept_at_once(rule: str) -> None:
    """Slots that are older than the new interval allows do not wait for their phase."""
    config = {"update_rule": rule, "topk_ratio": 0.1, "max_update_interval": 50}
    params, optimizer = build(config | {"update_interval": 8})
    for step in range(14):
        give(params, step)
        optimizer.step()
    assert optimizer.stats.staleness_steps > 4
    state = optimizer.state_dict()

    resumed = zenflow.ZenFlowAdamW(params, lr=1e-2, config=config | {"update_interval": 2})
    resumed.load_state_dict(state)
    for step in range(14, 20):
        give(params, step)
        resumed.step()
        if step > 14:  # the sweeps of the first step are published in the second
            assert resumed.stats.staleness_steps <= 2
    resumed.close()
    optimizer.close()
