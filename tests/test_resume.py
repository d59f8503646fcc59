"""Saving at any point of a window and resuming elsewhere changes no bit."""

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = list(
    itertools.product(
        (1, 3, 4),  # update_interval
        (0, 0.1, 1),  # topk_ratio
        ("replay", "accumulate"),
        (True, False),  # lookahead
        (True, False),  # overlap_step
        (3, "auto"),  # select_interval
    )
)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 200), nn.Linear(200, 64)
    ).to(dtype)


def make_grads(model: nn.Module, num_steps: int) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [
        [torch.randn(p.shape, generator=random).to(p.dtype) for p in model.parameters()]
        for _ in range(num_steps)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[list[Tensor]]) -> None:
    for step_grads in grads:
        for param, grad in zip(model.parameters(), step_grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def assert_same_state(one: zenflow.ZenFlowAdamW, other: zenflow.ZenFlowAdamW) -> None:
    state, other_state = one.state_dict()["state"], other.state_dict()["state"]
    assert state.keys() == other_state.keys()
    for number, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other_state[number][name]), (number, name)


def through_file(*objects: object) -> list:
    buffer = io.BytesIO()
    torch.save(list(objects), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.covers("resume")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_resume_is_bit_exact(number: int) -> None:
    interval, ratio, rule, lookahead, overlap, select_interval = CASES[number]
    config = zenflow.ZenFlowConfig(
        update_interval=interval,
        topk_ratio=ratio,
        update_rule=rule,
        lookahead=lookahead,
        overlap_step=overlap,
        select_interval=select_interval,
    )
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    cut = 1 + number % 9
    model = make_model(dtype)
    grads = make_grads(model, cut + 9)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    train(model, optimizer, grads[:cut])
    weights, state = through_file(model.state_dict(), optimizer.state_dict())
    train(model, optimizer, grads[cut:])

    resumed_model = make_model(dtype)
    resumed_model.load_state_dict(weights)
    resumed = zenflow.ZenFlowAdamW(resumed_model.parameters(), lr=1.0, config=config)
    resumed.load_state_dict(state)
    train(resumed_model, resumed, grads[cut:])

    for param, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(param, other)
    assert optimizer.stats.staleness_steps == resumed.stats.staleness_steps
    assert_same_state(optimizer, resumed)
    optimizer.synchronize()
    resumed.synchronize()
    for param, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(param, other)
    optimizer.close()
    resumed.close()


def test_saving_changes_nothing() -> None:
    runs = []
    for saves in (False, True):
        model = make_model()
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
        for grads in make_grads(model, 12):
            train(model, optimizer, [grads])
            if saves:
                optimizer.state_dict()
        runs.append(copy.deepcopy(list(model.parameters())))
        optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_saved_state_is_a_copy() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 2})
    grads = make_grads(model, 8)
    train(model, optimizer, grads[:3])
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    train(model, optimizer, grads[3:])
    optimizer.close()
    for number, tensors in kept["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, saved["state"][number][name]), (number, name)


@pytest.mark.covers("the optimizer's state as plain AdamW has it")
@pytest.mark.parametrize("ratio", [0, 0.1, 1])
def test_plain_adamw_and_back(ratio: float) -> None:
    """AdamW continues from our state and we from its, as AdamW alone would have gone on."""
    model = make_model()
    grads = make_grads(model, 18)
    reference = copy.deepcopy(model)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train(reference, plain, grads)

    config = {"topk_ratio": ratio, "overlap_step": False, "update_interval": 1}
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    train(model, ours, grads[:6])
    middle = torch.optim.AdamW(model.parameters())
    middle.load_state_dict(through_file(ours.state_dict())[0])
    ours.close()
    train(model, middle, grads[6:12])
    last = zenflow.ZenFlowAdamW(model.parameters(), config=config)
    last.load_state_dict(through_file(middle.state_dict())[0])
    train(model, last, grads[12:])
    last.close()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-6)


def test_an_empty_state_starts_nothing() -> None:
    """A wrapper may load it before the model is where it will train."""
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 2})
    empty = optimizer.state_dict()
    optimizer.load_state_dict(empty)
    assert optimizer._engine is None
    train(model, optimizer, make_grads(model, 3))
    optimizer.load_state_dict(empty)
    assert optimizer.stats.step == 0
    train(model, optimizer, make_grads(model, 3))
    assert optimizer.state_dict()["state"][0]["step"] == 3
    optimizer.close()


def other_shape(state: dict) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(3)


def fewer_parameters(state: dict) -> None:
    state["param_groups"][0]["params"].pop()


def other_version(state: dict) -> None:
    state["zenflow"]["version"] = 99


@pytest.mark.covers("a state that does not fit")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_shape, "exp_avg of saved parameter 0 has shape"),
        (fewer_parameters, "the saved optimizer has 5 parameters and this one 6"),
        (other_version, "format version 99"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    damage: Callable[[dict], None], message: str
) -> None:
    model = make_model()
    grads = make_grads(model, 3)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 2})
    train(model, optimizer, grads)
    before = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(before)
    damage(damaged)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    after = optimizer.state_dict()
    assert after["zenflow"]["step"] == before["zenflow"]["step"]
    for number, tensors in before["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after["state"][number][name])
    optimizer.close()


@pytest.mark.covers("a state that does not fit")
def test_another_topk_ratio_is_refused_while_gradients_wait_and_taken_after_synchronize() -> None:
    model = make_model()
    grads = make_grads(model, 10)
    optimizer = zenflow.ZenFlowAdamW(
        model.parameters(), config={"topk_ratio": 0.1, "update_interval": 4}
    )
    train(model, optimizer, grads[:5])
    other = zenflow.ZenFlowAdamW(
        model.parameters(), config={"topk_ratio": 0.3, "update_interval": 4}
    )
    with pytest.raises(ValueError, match=r"topk_ratio=0\.3"):
        other.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    other.load_state_dict(optimizer.state_dict())
    train(model, other, grads[5:])
    assert other.state_dict()["state"][0]["step"] == 10
    optimizer.close()
    other.close()


RESUME_IN_NEW_PROCESS = """
import sys, torch, zenflow
sys.path.insert(0, sys.argv[1])
from test_resume import make_grads, make_model, train
weights, state = torch.load(sys.argv[2], weights_only=True)
model = make_model()
model.load_state_dict(weights)
optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
optimizer.load_state_dict(state)
train(model, optimizer, make_grads(model, 12)[6:])
torch.save(model.state_dict(), sys.argv[3])
"""


@pytest.mark.covers("resume")
def test_resume_in_a_new_process(tmp_path) -> None:
    model = make_model()
    grads = make_grads(model, 12)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
    train(model, optimizer, grads[:6])
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    train(model, optimizer, grads[6:])
    arguments = [str(tmp_path / "saved.pt"), str(tmp_path / "resumed.pt")]
    here = __file__.rpartition("/")[0]
    subprocess.run(
        [sys.executable, "-c", RESUME_IN_NEW_PROCESS, here, *arguments], check=True, timeout=120
    )
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed[name]), name
    optimizer.close()
