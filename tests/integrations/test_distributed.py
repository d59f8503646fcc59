"""Several processes: DistributedDataParallel over gloo, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zenflow

WORLD = 2
STEPS = 7
CONFIGS: dict[str, dict[str, Any]] = {
    "synchronous": {"overlap_step": False, "update_interval": 1},
    "overlapped": {"update_interval": 3, "topk_ratio": 0.2},
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def train_alone(optimizer_of: Any) -> nn.Module:
    """The same steps in one process, with the mean of the ranks' losses."""
    model = make_model()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        (sum(loss_of(model, rank, step) for rank in range(WORLD)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, zenflow.ZenFlowAdamW):
        optimizer.close()
    return model


def train_as_rank(rank: int, folder: str) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        model = make_model()
        wrapped = DistributedDataParallel(model)
        optimizer = zenflow.ZenFlowAdamW(wrapped.parameters(), lr=1e-2, config=config)
        for step in range(STEPS):
            loss_of(wrapped, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        torch.save(model.state_dict(), f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what each rank trained with each config: starting processes takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(train_as_rank, (str(folder),), nprocs=WORLD)
    return folder


@pytest.mark.covers("distributed training")
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_agree_and_train_as_one_process(name: str, trained: Path) -> None:
    ranks = [torch.load(trained / f"{name}-{rank}.pt", weights_only=True) for rank in range(WORLD)]
    if name == "synchronous":
        alone = train_alone(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        alone = train_alone(
            lambda model: zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=CONFIGS[name])
        )
    for param, expected in alone.state_dict().items():
        assert torch.equal(ranks[0][param], ranks[1][param]), param
        assert torch.allclose(ranks[0][param], expected, rtol=0, atol=1e-5), param


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of several sees."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: WORLD)


@pytest.mark.covers("distributed training")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("config", "remedy"),
    [({}, "update_interval=4"), ({"stream_gradients": True}, "stream_gradients=False")],
)
def test_what_would_drift_apart_is_refused(config: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        zenflow.ZenFlowAdamW(make_model().parameters(), config=config)


@pytest.mark.covers("distributed training")
def test_a_process_group_made_later_is_noticed(request: pytest.FixtureRequest) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = zenflow.ZenFlowAdamW(model.parameters())
    request.getfixturevalue("process_group")
    loss_of(model, 0, 0).backward()
    with pytest.raises(ValueError, match="update_interval=4"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.covers("distributed training", "refused by name: what is not supported")
def test_sharded_parameters_are_refused_by_name(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"0\.weight is a DTensor.*DistributedDataParallel"):
            zenflow.ZenFlowAdamW(model.named_parameters())
    finally:
        dist.destroy_process_group()
