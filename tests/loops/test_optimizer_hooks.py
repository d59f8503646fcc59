"""What is attached to an optimizer from outside, and what other code does with it."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from twins import OVERLAPPED, assert_same_bits, seeded

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = seeded(8, 20, seed=step)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, zenflow.ZenFlowAdamW]]:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED)
    train(model, optimizer, range(4))
    yield model, optimizer
    optimizer.close()


REGISTER: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "own": (
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    ),
    "global": (
        lambda _, hook: torch_optimizer.register_optimizer_step_pre_hook(hook),
        lambda _, hook: torch_optimizer.register_optimizer_step_post_hook(hook),
    ),
}


@pytest.mark.covers("optimizer hooks")
@pytest.mark.parametrize("whose", REGISTER)
def test_step_hooks_run_around_each_step(
    trained: tuple[nn.Module, zenflow.ZenFlowAdamW], whose: str
) -> None:
    """Before it gradients are still there; after it the figures are those of this step."""
    model, optimizer = trained
    seen: list[tuple[str, int, bool]] = []

    def note(when: str) -> Callable[..., None]:
        def hook(which: Optimizer, arguments: tuple[Any, ...], _: dict[str, Any]) -> None:
            assert which is optimizer
            has_grads = all(param.grad is not None for param in model.parameters())
            seen.append((when, optimizer.stats.step, has_grads))

        return hook

    before, after = REGISTER[whose]
    handles = [before(optimizer, note("before")), after(optimizer, note("after"))]
    try:
        train(model, optimizer, range(4, 6))
    finally:
        for handle in handles:
            handle.remove()
    train(model, optimizer, range(6, 7))
    assert seen == [
        *[("before", 4, True), ("after", 5, False)],
        *[("before", 5, True), ("after", 6, False)],
    ]


@pytest.mark.covers("optimizer hooks")
def test_a_step_hook_may_change_gradients_and_rates() -> None:
    """As libraries do that clip, or anneal, in a hook."""
    results = []
    for in_hook in (True, False):
        model = make_model()
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED)

        def change(*_: Any, model: nn.Module = model, optimizer: Optimizer = optimizer) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.param_groups[0]["lr"] *= 0.9

        if in_hook:
            optimizer.register_step_pre_hook(change)
        for step in range(9):
            x = seeded(8, 20, seed=step)
            (model(x) - x).square().mean().backward()
            if not in_hook:
                change()
            optimizer.step()
        optimizer.close()
        results.append(list(model.parameters()))
    assert_same_bits(*results)


@pytest.mark.covers("optimizer hooks")
def test_state_dict_hooks_run_and_their_additions_are_kept(
    trained: tuple[nn.Module, zenflow.ZenFlowAdamW],
) -> None:
    model, optimizer = trained
    calls: list[str] = []

    def add(_: Optimizer, state: dict[str, Any]) -> None:
        assert len(state["state"]) == 4
        state["mine"] = 1
        calls.append("after save")

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before save"))
    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    saved = optimizer.state_dict()
    assert saved["mine"] == 1
    assert saved["zenflow"]["step"] == 4
    optimizer.load_state_dict(saved)
    assert calls == ["before save", "after save", "after load"]
    assert optimizer.state_dict()["zenflow"]["step"] == 4
    train(model, optimizer, range(4, 6))


@pytest.mark.covers("gradients in foreign memory")
def test_gradients_of_overlapping_memory_are_copied(
    trained: tuple[nn.Module, zenflow.ZenFlowAdamW],
) -> None:
    """An expanded gradient has each value many times at one address."""
    model, optimizer = trained
    reference = make_model()
    expected = zenflow.ZenFlowAdamW(reference.parameters(), lr=1e-2, config=OVERLAPPED)
    train(reference, expected, range(4))
    for _ in range(4):
        for each in (model, reference):
            for param in each.parameters():
                grad = seeded(param.shape[0], 1, seed=3).expand(-1, param[0].numel())
                grad = grad.reshape(param.shape) if each is reference else grad.view_as(param)
                param.grad = grad
        optimizer.step()
        expected.step()
    optimizer.synchronize()
    expected.close()
    assert_same_bits(list(model.parameters()), list(reference.parameters()))


def test_repr_names_the_class_and_its_groups() -> None:
    optimizer = zenflow.ZenFlowAdamW(make_model().parameters(), lr=1e-2)
    assert repr(optimizer).startswith("ZenFlowAdamW (\nParameter Group 0\n")
    assert "lr: 0.01" in repr(optimizer)


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_by_name(copying: Callable[[Any], Any]) -> None:
    model = nn.Linear(16, 16)
    optimizer = zenflow.ZenFlowAdamW(model.parameters())
    with pytest.raises(TypeError, match="use state_dict"):
        copying(optimizer)
    optimizer.close()


def test_state_hooks_see_the_whole_state() -> None:
    model = nn.Linear(16, 16)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 2})
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state)))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: seen.append((len(state["state"]), "zenflow" in state))
    )
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert seen == [["param_groups", "state", "zenflow"], (2, True)]
    optimizer.close()


def test_methods_run_on_a_wrapper_reach_the_optimizer() -> None:
    """As Fabric's and Lightning's wrappers run them: on an object with a copy of its attributes."""
    layers = [nn.Linear(16, 16), nn.Linear(16, 16)]
    optimizer = zenflow.ZenFlowAdamW(layers[0].parameters(), config={"update_interval": 1})
    wrapper = object.__new__(zenflow.ZenFlowAdamW)
    wrapper.__dict__.update(optimizer.__dict__)
    layers[0](torch.ones(1, 16)).sum().backward()
    wrapper.step()
    wrapper.add_param_group({"params": list(layers[1].parameters())})
    layers[1](torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3]
    wrapper.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
