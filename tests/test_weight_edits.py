"""Weights that the user changes between steps are kept, never brought back to older values."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"overlap_step": False, "update_interval": 1, "select_interval": 3}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(8, 40, generator=random).to(next(model.parameters()).dtype)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def load_state_dict(model: nn.Module) -> None:
    torch.manual_seed(7)
    model.load_state_dict({k: torch.randn_like(v) * 0.1 for k, v in model.state_dict().items()})


def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def replace_memory(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def edit_one(model: nn.Module) -> None:
    nn.init.zeros_(model[2].weight)


def write_through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(param.detach() * 0.5)


EDITS = [write_through_data, load_state_dict, scale_in_place, replace_memory, edit_one]


@pytest.mark.covers("weights written by the user")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("ratio", [0, 0.1, 1])
def test_synchronous_equals_adamw_with_the_same_edit(
    edit: Callable[[nn.Module], None], ratio: float
) -> None:
    model, reference = make_model(), make_model()
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=EXACT | {"topk_ratio": ratio})
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for seed in range(3):
        train(model, ours, 5, seed)
        train(reference, plain, 5, seed)
        edit(model)
        edit(reference)
    train(model, ours, 5, 9)
    train(reference, plain, 5, 9)
    ours.close()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-6)


@pytest.mark.covers("weights written by the user")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("steps_before", [1, 2, 7])
def test_edited_values_stay(
    edit: Callable[[nn.Module], None], dtype: torch.dtype, interval: int, steps_before: int
) -> None:
    """With a learning rate of 0 after the edit, no pending update may show."""
    model = make_model(dtype)
    optimizer = zenflow.ZenFlowAdamW(
        model.parameters(), lr=1e-2, config={"update_interval": interval, "topk_ratio": 0.1}
    )
    train(model, optimizer, steps_before, 0)
    if edit is edit_one:
        optimizer.synchronize()
    edit(model)
    edited = copy.deepcopy(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.0
    for step in range(9):
        train(model, optimizer, 1, step)
        for param, expected in zip(model.parameters(), edited, strict=True):
            assert torch.equal(param, expected)
    optimizer.synchronize()
    optimizer.close()
    for param, expected in zip(model.parameters(), edited, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("after", ["synchronize", "close", "state_dict"])
def test_an_edit_before_a_drain_stays(after: str) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
    train(model, optimizer, 6, 0)
    load_state_dict(model)
    edited = copy.deepcopy(list(model.parameters()))
    getattr(optimizer, after)()
    optimizer.close()
    for param, expected in zip(model.parameters(), edited, strict=True):
        assert torch.equal(param, expected)


def test_pending_steps_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.named_parameters(), config={"update_interval": 4})
    train(model, optimizer, 6, 0)
    edit_one(model)
    with caplog.at_level(logging.WARNING, "zenflow"):
        train(model, optimizer, 1, 1)
    optimizer.close()
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("2.weight was changed outside of the optimizer")
    assert "pending steps" in message


def test_nothing_is_told_where_nothing_was_changed(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(torch.bfloat16)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 3})
    with caplog.at_level(logging.WARNING, "zenflow"):
        train(model, optimizer, 6, 0)
        optimizer.synchronize()
        train(model, optimizer, 6, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state_dict()
        train(model, optimizer, 6, 0)
    optimizer.close()
    assert not caplog.records


class Renormalised(nn.Module):
    """An embedding that its own forward edits in place, in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16, max_norm=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def test_a_weight_edited_in_every_step_learns_as_with_adamw() -> None:
    """The first edit finds updates pending; from then on the weight is current at each edit."""
    models = [Renormalised(), Renormalised()]
    optimizers = [
        zenflow.ZenFlowAdamW(models[0].parameters(), lr=1e-2, config={"update_interval": 4}),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2),
    ]
    for step in range(100):
        tokens = torch.randint(50, (32,), generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            (model(tokens) - 0.2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizers[0].close()
    with torch.no_grad():
        ours, plain = (m.embedding.weight for m in models)
        moved = (plain - Renormalised().embedding.weight).abs().mean()
        assert (ours - plain).abs().mean() < 0.03 * moved


def test_resume_in_either_order_of_loading_is_bit_exact() -> None:
    model = make_model(torch.bfloat16)
    config = {"update_interval": 4, "topk_ratio": 0.1}
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    train(model, optimizer, 6, 0)
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    train(model, optimizer, 6, 1)
    for optimizer_first in (False, True):
        other = make_model(torch.bfloat16)
        resumed = zenflow.ZenFlowAdamW(other.parameters(), config=config)
        if optimizer_first:
            resumed.load_state_dict(state)
            resumed.state_dict()
        other.load_state_dict(weights)
        if not optimizer_first:
            resumed.load_state_dict(state)
        train(other, resumed, 6, 1)
        for param, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(param, expected)
        resumed.close()
    optimizer.close()


@pytest.mark.covers("weights written by the user")
def test_a_state_loaded_for_other_weights_does_not_bring_its_own_back() -> None:
    model = make_model(torch.bfloat16)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config={"update_interval": 4})
    train(model, optimizer, 6, 0)
    state = optimizer.state_dict()
    optimizer.close()
    other = make_model(torch.bfloat16)
    resumed = zenflow.ZenFlowAdamW(other.parameters(), config={"update_interval": 4})
    resumed.load_state_dict(state)
    load_state_dict(other)
    edited = copy.deepcopy(list(other.parameters()))
    resumed.param_groups[0]["lr"] = 0.0
    train(other, resumed, 6, 1)
    resumed.close()
    for param, expected in zip(other.parameters(), edited, strict=True):
        assert torch.equal(param, expected)


def test_a_resized_parameter_is_refused_by_name() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.named_parameters(), config={"update_interval": 2})
    train(model, optimizer, 2, 0)
    model[2].weight.data = torch.zeros(41, 60)
    model[2].bias.data = torch.zeros(41)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=r"2\.weight|2\.bias"):
        optimizer.step()
