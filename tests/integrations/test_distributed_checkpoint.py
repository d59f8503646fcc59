"""torch.distributed.checkpoint: its own view of an optimizer's state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zenflow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x.to(model[0].weight.dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.covers("resume", "the optimizer's state as plain AdamW has it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [{"overlap_step": False, "update_interval": 1}, {"update_interval": 3}]
)
def test_it_saves_and_resumes(config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """It knows nothing of what waits, so that has to be applied first; masters travel along."""
    model = make_model(dtype)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    train(model, optimizer, 0, 5)
    optimizer.synchronize()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    assert optimizer.stats.step == 5, "looking at the state takes no step"

    other = make_model(dtype)
    resumed = zenflow.ZenFlowAdamW(other.parameters(), lr=1e-2, config=config)
    weights, state = get_state_dict(other, resumed)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    train(other, resumed, 5, 6)
    after = resumed.state_dict()["state"]
    assert all(state["step"] == 6 for state in after.values())
    train(model, optimizer, 5, 6)
    expected = optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    if config["update_interval"] == 1:
        for number, tensors in expected.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, after[number][name]), (number, name)
    resumed.close()
    optimizer.close()
