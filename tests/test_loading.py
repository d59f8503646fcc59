"""Loading: refused whole or taken whole, borrowed until it is needed, never in memory twice."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zenflow
from test_resume import make_grads, make_model, through_file, train

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = {"update_interval": 4, "topk_ratio": 0.1}
SYNCHRONOUS = {"update_interval": 1, "topk_ratio": 0.1, "overlap_step": False}


def trained(num_steps: int = 6, **arguments: Any) -> tuple[nn.Module, zenflow.ZenFlowAdamW]:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=CONFIG, **arguments)
    train(model, optimizer, make_grads(model, num_steps))
    return model, optimizer


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every entry of nested mappings and lists, by its path; of equal siblings only the first."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))[:1]
    else:
        return []
    found = []
    for key, child in items:
        found += [(*path, key), *places(child, (*path, key))]
    return found


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


OPTIONAL = {"names", "param_names", "master", "zenflow"}


@pytest.mark.covers("a state that does not fit")
def test_anything_missing_or_of_another_kind_is_refused_before_anything_changes() -> None:
    """Each entry of a saved state in turn is taken away, or is something else."""
    model, optimizer = trained()
    saved = optimizer.state_dict()
    tried = 0
    for path in places(saved):
        *above, last = path
        if last in OPTIONAL or (path[0] == "param_groups" and path[-1] in ("foreach", "fused")):
            continue
        for damage in ("missing", "other"):
            damaged = copy.deepcopy(saved)
            parent = at(damaged, tuple(above))
            if damage == "other":
                parent[last] = object()
            elif isinstance(parent, dict) and above[-1:] not in (["state"], ["weights"]):
                del parent[last]
            else:
                continue
            tried += 1
            with pytest.raises(ValueError, match=r"damaged|not numbers|saved state|saved zenflow"):
                optimizer.load_state_dict(damaged)
    assert tried > 60
    after = optimizer.state_dict()
    for number, tensors in saved["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after["state"][number][name])
    grads = make_grads(model, 10)[6:]
    train(model, optimizer, grads)
    other, undisturbed = trained(10)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
    optimizer.close()
    undisturbed.close()


def set_in(*path: Any, to: Any) -> Callable[[dict], None]:
    def damage(state: dict) -> None:
        at(state, path[:-1])[path[-1]] = to

    return damage


SEGMENT = ("zenflow", "weights", 2, "segments", 0)
DAMAGES = {
    "a NaN step count": (set_in("state", 0, "step", to=torch.tensor(float("nan"))), "'step'"),
    "integer moments": (
        set_in("state", 0, "exp_avg", to=torch.zeros(16, 3, 3, 3, dtype=torch.int64)),
        "floating point",
    ),
    "a channel that is none": (
        lambda state: at(state, SEGMENT)["selected"].fill_(10**6),
        "is not 58 of its 576 channels",
    ),
    "too few channels": (
        lambda state: at(state, SEGMENT).update(selected=torch.arange(3)),
        "selects 3 channels",
    ),
    "a gradient of other rows": (
        lambda state: at(state, SEGMENT)["slots"][0].update(grad=torch.zeros(5, 519)),
        "waiting gradient",
    ),
    "rows that are missing": (
        lambda state: at(state, SEGMENT[:-1]).pop(),
        "rows in its segments",
    ),
    "a state of no parameter": (
        lambda state: state["state"].update({77: state["state"][0]}),
        "parameter 77",
    ),
    "a negative lr": (set_in("param_groups", 0, "lr", to=-1.0), r"lr=-1\.0"),
    "amsgrad": (set_in("param_groups", 0, "amsgrad", to=True), "amsgrad=True"),
    "maximize": (set_in("param_groups", 0, "maximize", to=True), "maximize=True"),
}


@pytest.mark.covers("a state that does not fit")
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_or_means_something_else_is_refused(name: str) -> None:
    damage, message = DAMAGES[name]
    _, optimizer = trained()
    damaged = copy.deepcopy(optimizer.state_dict())
    damage(damaged)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    assert optimizer.stats.step == 6
    optimizer.close()


@pytest.mark.covers("a state that does not fit", "decoupled decay")
def test_a_state_of_adam_is_refused_if_its_decay_differs() -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, adam, make_grads(model, 2))
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=CONFIG)
    with pytest.raises(ValueError, match=r"torch\.optim\.Adam"):
        optimizer.load_state_dict(adam.state_dict())
    saved = adam.state_dict()
    saved["param_groups"][0]["weight_decay"] = 0
    optimizer.load_state_dict(saved)


@pytest.mark.covers("a state that does not fit")
@pytest.mark.parametrize("size", [0, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(size: float, tmp_path: Path) -> None:
    _, optimizer = trained()
    path = tmp_path / "state.pt"
    torch.save(optimizer.state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(size * len(whole)) if size < 1 else int(size)])
    with pytest.raises((RuntimeError, EOFError, ValueError, OSError)):
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    assert optimizer.stats.step == 6
    optimizer.close()


class Pair(nn.Module):
    """Two matrices of one shape, so that their order shows in nothing but names and values."""

    def __init__(self, first: str = "first", second: str = "second") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module(first, nn.Linear(20, 20, bias=False))
        self.add_module(second, nn.Linear(20, 20, bias=False))


def saved_pair() -> tuple[dict, dict]:
    pair = Pair()
    optimizer = zenflow.ZenFlowAdamW(pair.parameters(), config=CONFIG)
    train(pair, optimizer, make_grads(pair, 5))
    result = through_file(pair.state_dict(), optimizer.state_dict())
    optimizer.close()
    return result[0], result[1]


@pytest.mark.covers("a state that does not fit")
def test_parameters_in_another_order_are_refused_by_name() -> None:
    weights, state = saved_pair()
    pair = Pair()
    pair.load_state_dict(weights)
    optimizer = zenflow.ZenFlowAdamW(reversed(list(pair.parameters())), config=CONFIG)
    with pytest.raises(ValueError, match=r"'first\.weight' and is 'second\.weight'.*order"):
        optimizer.load_state_dict(state)


@pytest.mark.covers("a state that does not fit")
def test_renamed_parameters_are_refused() -> None:
    _, state = saved_pair()
    pair = Pair("one", "other")
    optimizer = zenflow.ZenFlowAdamW(pair.parameters(), config=CONFIG)
    with pytest.raises(ValueError, match=r"'first\.weight' and is 'one\.weight'.*renamed"):
        optimizer.load_state_dict(state)


@pytest.mark.covers("a state that does not fit")
@pytest.mark.parametrize("model_first", [True, False])
def test_without_names_another_order_is_known_by_the_weights(model_first: bool) -> None:
    weights, state = saved_pair()
    params = [nn.Parameter(weight.clone()) for weight in weights.values()]
    swapped = params[::-1] if model_first else [nn.Parameter(torch.zeros(20, 20)) for _ in params]
    optimizer = zenflow.ZenFlowAdamW(swapped, config=CONFIG)
    if not model_first:
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for param, weight in zip(swapped, params[::-1], strict=True):
                param.copy_(weight)
    for param in swapped:
        param.grad = torch.ones(20, 20)
    with pytest.raises(ValueError, match="in the order in which"):
        if model_first:
            optimizer.load_state_dict(state)
        else:
            optimizer.step()
    optimizer._session.abandon()


@pytest.mark.covers("resume")
@pytest.mark.parametrize(
    "wrap", [lambda m: nn.ModuleDict({"model": m}), torch.compile, nn.Sequential]
)
def test_a_wrapper_renames_nothing(wrap: Callable[[nn.Module], nn.Module]) -> None:
    weights, state = saved_pair()
    pair = Pair()
    pair.load_state_dict(weights)
    wrapped = wrap(pair)
    optimizer = zenflow.ZenFlowAdamW(wrapped.named_parameters(), config=CONFIG)
    saved = copy.deepcopy(state)
    optimizer.load_state_dict(saved)
    assert optimizer.stats.step == 5


def test_a_model_without_its_weights_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _, state = saved_pair()
    caplog.clear()
    pair = Pair()
    optimizer = zenflow.ZenFlowAdamW(pair.parameters(), config=CONFIG)
    optimizer.load_state_dict(state)
    assert not caplog.records, "the weights may be loaded afterwards"
    train(pair, optimizer, make_grads(pair, 1))
    assert "none of the model's weights" in caplog.text
    optimizer.close()


# Borrowed until it is needed


@pytest.mark.covers("the optimizer's state as plain AdamW has it")
@pytest.mark.parametrize("source", ["file", "live state of AdamW", "our own"])
@pytest.mark.parametrize("plain_first", [True, False])
def test_what_is_loaded_may_be_shared_with_another_optimizer(
    plain_first: bool, source: str
) -> None:
    """torch's optimizers train the very tensors that they were loaded with."""
    model = make_model()
    grads = make_grads(model, 8)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=SYNCHRONOUS)
    train(model, plain if source != "our own" else ours, grads[:4])
    state = plain.state_dict() if source != "our own" else ours.state_dict()
    if source == "file":
        (state,) = through_file(state)
    twin = copy.deepcopy(model)
    resumed = zenflow.ZenFlowAdamW(twin.parameters(), config=SYNCHRONOUS)
    resumed.load_state_dict(state)
    other = plain
    if source != "live state of AdamW":
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(state)
    for step_grads in grads[4:]:
        order = [(model, other), (twin, resumed)]
        for each, optimizer in order if plain_first else order[::-1]:
            train(each, optimizer, [step_grads])
    for one, another in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=2e-6)
    ours.close()
    resumed.close()


def test_loaded_tensors_written_by_hand_are_noticed() -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    state["state"][0]["exp_avg"].zero_()
    with pytest.raises(RuntimeError, match="changed after load_state_dict"):
        train(model, optimizer, make_grads(model, 1))
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        train(model, optimizer, make_grads(model, 1))
    optimizer._session.abandon()


@pytest.mark.parametrize("num_loads", [1, 3])
def test_a_state_is_loaded_and_saved_without_a_step_between(num_loads: int) -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    for _ in range(num_loads):
        optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state_dict()
    assert repr(after["zenflow"]) == repr(saved["zenflow"])
    for number, tensors in saved["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after["state"][number][name])
    optimizer.close()


@pytest.mark.covers("resume")
def test_a_loaded_state_is_applied_by_close_and_synchronize() -> None:
    """Its waiting gradients are: the weights are what the saved run would have synchronized to."""
    model, optimizer = trained()
    lagging, state = through_file(model.state_dict(), optimizer.state_dict())
    optimizer.synchronize()
    for finish in ("synchronize", "close"):
        other = make_model()
        other.load_state_dict(lagging)
        resumed = zenflow.ZenFlowAdamW(other.parameters(), config=CONFIG)
        resumed.load_state_dict(state)
        getattr(resumed, finish)()
        for one, another in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, another)
        resumed.close()
    optimizer.close()


@pytest.mark.covers("parameters without a gradient")
def test_the_state_of_a_parameter_that_waits_for_its_gradient_is_saved_again() -> None:
    """Loaded from plain AdamW, frozen now: it must not vanish from the next save."""
    model = make_model()
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, make_grads(model, 3))
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=CONFIG)
    optimizer.load_state_dict(plain.state_dict())
    model.zero_grad()
    model[3].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert saved.keys() == plain.state_dict()["state"].keys()
    assert torch.equal(saved[4]["exp_avg"], plain.state[model[3].weight]["exp_avg"])
    assert saved[4]["step"] == 3
    optimizer.close()


# Files


def flatten(state: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """What safetensors and JSON hold between them."""
    if isinstance(state, Tensor):
        tensors[prefix] = state
        return {"__tensor__": prefix}
    if isinstance(state, dict):
        return {str(k): flatten(v, f"{prefix}.{k}", tensors) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return [flatten(v, f"{prefix}.{i}", tensors) for i, v in enumerate(state)]
    return state


def unflatten(state: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, dict):
        if "__tensor__" in state:
            return tensors[state["__tensor__"]]
        return {(int(k) if k.isdecimal() else k): unflatten(v, tensors) for k, v in state.items()}
    if isinstance(state, list):
        return [unflatten(v, tensors) for v in state]
    return state


@pytest.mark.covers("resume", "the optimizer's state as plain AdamW has it")
def test_it_goes_through_safetensors_and_json(tmp_path: Path) -> None:
    """Contiguous tensors that share no memory, and numbers: nothing else is in a state."""
    model, optimizer = trained()
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(flatten(optimizer.state_dict(), "", tensors))
    save_file(tensors, tmp_path / "state.safetensors")
    lagging = copy.deepcopy(model.state_dict())
    grads = make_grads(model, 12)[6:]
    train(model, optimizer, grads)

    other = make_model()
    other.load_state_dict(lagging)
    resumed = zenflow.ZenFlowAdamW(other.parameters(), config=CONFIG)
    resumed.load_state_dict(unflatten(json.loads(rest), load_file(tmp_path / "state.safetensors")))
    train(other, resumed, grads)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
    optimizer.close()
    resumed.close()


MEASURED = """
import resource, sys, torch, zenflow
from torch import nn
how, path = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(40)])
config = {"update_interval": 4, "topk_ratio": 0.05, "host_threads": 1}

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def step(optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()

optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=config)
if how == "save":
    for _ in range(10):
        step(optimizer)
    print(resident())
    torch.save([model.state_dict(), optimizer.state_dict()], path)
else:
    def load():
        weights, state = torch.load(path, weights_only=True, mmap=how == "mmap")
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    load()
    for _ in range(10):
        step(optimizer)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.covers("memory at load")
def test_loading_needs_little_more_than_training(tmp_path: Path) -> None:
    """Peak of resident memory over loading and going on, against what the saved run took."""

    def measure(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, how, str(tmp_path / "saved.pt")],
            check=True,
            timeout=300,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    steady = measure("save")
    for how in ("load", "mmap"):
        assert measure(how) <= 1.15 * steady, how


@pytest.mark.covers("memory at load")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_its_tensors_and_little_more(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=dtype) for _ in range(20)])
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=CONFIG)
    train(model, optimizer, make_grads(model, 9))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = sum(
        12 * p.numel() if p.dim() > 1 or dtype != torch.float32 else 8 * p.numel()
        for p in model.parameters()
    )
    waiting = sum(
        slot["grad"].nbytes
        for weight in optimizer.state_dict()["zenflow"]["weights"].values()
        for segment in weight["segments"]
        for slot in segment["slots"]
    )
    size = (tmp_path / "state.pt").stat().st_size
    assert size <= 1.02 * (state + waiting)
    optimizer.close()
