"""Weights that lag are not saved or evaluated unnoticed, in any loop."""

import copy
import gc
import io
import logging
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zenflow

OVERLAPPED = {"update_interval": 4, "topk_ratio": 0.1}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> None:
    for step in range(num_steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def save(model: nn.Module) -> None:
    model.state_dict()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 16))
    model.train()


def evaluate_a_part(model: nn.Module) -> None:
    model.eval()
    with torch.inference_mode():
        model[2](torch.zeros(1, 24))
    model.train()


READS = [save, evaluate, evaluate_a_part]


@pytest.mark.covers("pending steps")
@pytest.mark.parametrize("read", READS)
def test_a_plain_loop_is_warned_once_with_the_number_of_steps(
    read: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    train(model, optimizer)
    lag, before = optimizer.stats.staleness_steps, copies(model)
    assert lag > 1
    read(model)
    read(model)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert f"with {lag} steps pending" in record.getMessage()
    assert same(before, copies(model)), "a warning changes nothing"
    optimizer.close()


def forward_with_gradients(model: nn.Module) -> None:
    model.eval()  # as some do, to freeze dropout
    model(torch.zeros(1, 16))
    model.train()


def forward_in_training_mode(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 16))


@pytest.mark.parametrize("read", [forward_with_gradients, forward_in_training_mode])
def test_what_is_no_evaluation_is_left_alone(
    read: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    train(model, optimizer)
    read(model)
    optimizer.synchronize()
    for read_current in READS:
        read_current(model)
    assert not caplog.records
    optimizer.close()


@pytest.mark.covers("pending steps")
@pytest.mark.parametrize("read", READS[:2])
@pytest.mark.parametrize("managed", [True, False])
def test_a_given_model_or_a_trainer_makes_them_current(
    managed: bool, read: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    given = None if managed else model
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED, model=given)
    if managed:
        optimizer.train()
    train(model, optimizer)
    read(model)
    current = copies(model)
    assert optimizer.stats.staleness_steps == 0
    optimizer.synchronize()
    assert same(current, copies(model))
    assert not caplog.records
    optimizer.close()


@pytest.mark.covers("resume")
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_given_model_resumes_whichever_is_saved_first(optimizer_first: bool) -> None:
    config = {"update_interval": 3, "topk_ratio": 0.1}
    model = make_model().bfloat16()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, model=model)
    run(model, optimizer, 0, 7)
    saved = {}
    for name in ("optimizer", "model") if optimizer_first else ("model", "optimizer"):
        saved[name] = copy.deepcopy({"optimizer": optimizer, "model": model}[name].state_dict())
    run(model, optimizer, 7, 12)
    other = make_model().bfloat16()
    other.load_state_dict(saved["model"])
    resumed = zenflow.ZenFlowAdamW(other.parameters(), lr=1e-2, config=config, model=other)
    resumed.load_state_dict(saved["optimizer"])
    run(other, resumed, 7, 12)
    states = [each.state_dict()["state"] for each in (optimizer, resumed)]
    for number, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][number][name])
    assert same(copies(model), copies(other))
    optimizer.close()
    resumed.close()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).float().square().sum().backward()
        optimizer.step()


def test_many_bad_gradients_are_not_all_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert "0.weight" in caplog.text
    assert "and 12 more" in caplog.text


def test_eval_is_synchronize() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    train(model, optimizer)
    optimizer.eval()
    assert optimizer.stats.staleness_steps == 0
    optimizer.close()


def num_hooks(model: nn.Module) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in modules)


@pytest.mark.covers("memory over time")
@pytest.mark.parametrize("give_model", [True, False])
@pytest.mark.parametrize("close", [True, False])
def test_hooks_go_with_their_optimizer(close: bool, give_model: bool) -> None:
    model = make_model()
    for _ in range(3):
        given = model if give_model else None
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED, model=given)
        train(model, optimizer, 2)
        assert num_hooks(model) > 0
        if close:
            optimizer.close()
        else:
            del optimizer
            gc.collect()
        assert num_hooks(model) == 0


@pytest.mark.covers("exported weights")
def test_a_hooked_model_is_copied_and_pickled(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED, model=model)
    train(model, optimizer)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    before = copies(model)
    for other in others:
        evaluate(other)
        other.state_dict()
        assert same(copies(other), before)
    assert same(copies(model), before), "a copy has no optimizer"
    assert optimizer.stats.staleness_steps > 0
    optimizer.close()


def test_the_model_names_its_parameters_in_messages(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    model[2].weight.grad = torch.full((8, 24), float("inf"))
    optimizer.step()
    assert "2.weight" in caplog.text
    optimizer.close()


def test_parameters_of_several_models_have_no_hooks() -> None:
    models = [make_model(), make_model()]
    params = [p for model in models for p in model.parameters()]
    optimizer = zenflow.ZenFlowAdamW(params, config=OVERLAPPED)
    for model in models:
        train(model, optimizer, 2)
    assert all(num_hooks(model) == 0 for model in models)
    both = nn.ModuleList(models)  # made later, found by a later optimizer
    other = zenflow.ZenFlowAdamW(params, config=OVERLAPPED)
    train(models[0], other, 1)
    assert num_hooks(both) > 0
    optimizer.close()
    other.close()


@pytest.mark.covers("torch.compile")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_compiled_as_one_graph(when: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED)
    train(compiled if when == "after" else model, optimizer)
    evaluate(compiled)
    assert "steps pending" in caplog.text
    train(compiled, optimizer, 2)
    optimizer.close()


@pytest.mark.covers("ends with its process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_may_save_the_model() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED, model=model)
    train(model, optimizer)
    pid = os.fork()
    if pid == 0:
        try:
            model.state_dict()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    optimizer.close()


@pytest.mark.covers("failed workers")
def test_after_a_failure_the_model_can_still_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=OVERLAPPED, model=model)
    train(model, optimizer)
    engine = optimizer._engine
    assert engine is not None
    engine.pipeline.fail(RuntimeError("for the test"))
    model.state_dict()
    with pytest.raises(RuntimeError, match="for the test"):
        optimizer.step()
