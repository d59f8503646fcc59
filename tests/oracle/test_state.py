"""Beside the visible weights: masters, moments, counts and selected sets, after every step."""

import random
from typing import Any

import pytest
import torch
from runs import assert_same, assert_same_state, draw_grads, same_bits
from torch import Tensor, nn

import zenflow
from zenflow.testing.oracle import Oracle

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((40, 24), (24,), (33, 17), (6, 12, 3, 3), (700, 200), (5, 9, 4))
CONFIGS: dict[str, dict[str, Any]] = {
    "replay": {"update_interval": 3},
    "accumulate": {"update_interval": 3, "update_rule": "accumulate"},
    "accumulate every step": {"update_interval": 1, "update_rule": "accumulate"},
    "synchronous": {"update_interval": 2, "overlap_step": False},
    "synchronous accumulate": {
        "update_interval": 4,
        "overlap_step": False,
        "update_rule": "accumulate",
    },
    "warm-up": {"update_interval": 4, "full_warm_up_rounds": 4},
    "auto selection": {"update_interval": 2, "select_interval": "auto"},
    "none selected": {"update_interval": 2, "topk_ratio": 0},
}


def start(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=numbers) for shape in shapes]


def train_both(
    step: int,
    seed: int,
    params: list[nn.Parameter],
    optimizer: zenflow.ZenFlowAdamW,
    oracle: Oracle,
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    grads = list(draw_grads(random.Random(seed), numbers, params))
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()
    oracle.step(grads)
    assert_same(step, params, optimizer, oracle)


def selected(param: Tensor, optimizer: zenflow.ZenFlowAdamW) -> list[list[int]]:
    """The selected channels of each of a parameter's segments."""
    weight = optimizer._running_engine().weights.get(param)
    if weight is None or not weight.begun:
        return []
    return [sorted(s.channels.selected.tolist()) for s in weight.segments]


@pytest.mark.covers("biases before weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_state_after_every_step(name: str, dtype: torch.dtype) -> None:
    """Saving is how the state is read, so this also shows that saving changes nothing."""
    initial = [weight.to(dtype) for weight in start()]
    params = [nn.Parameter(weight.clone()) for weight in initial]
    config = {"topk_ratio": 0.2, "select_interval": 2} | CONFIGS[name]
    optimizer = zenflow.ZenFlowAdamW(params, lr=1e-2, config=config)
    group = {"params": range(len(params)), "lr": 1e-2}
    oracle = Oracle(initial, [group], optimizer.config)
    adopted = 0
    for step in range(24):
        before = [p.blocks[0].selected if p.blocks else None for p in oracle.params]
        train_both(step, 100 + step, params, optimizer, oracle)
        assert_same_state(params, optimizer, oracle)
        for param, expected in zip(params, oracle.params, strict=True):
            masks = [block.selected.nonzero().flatten().tolist() for block in expected.blocks]
            assert selected(param, optimizer) == masks
        incoming = [
            int((p.blocks[0].selected & ~was).sum())
            for p, was in zip(oracle.params, before, strict=True)
            if was is not None
        ]
        assert optimizer.stats.skipped == oracle.skipped
        if oracle.skipped:
            continue
        assert optimizer.stats.reselected_channels == sum(incoming)
        adopted += sum(map(bool, incoming))
    assert adopted >= 10 or config["topk_ratio"] == 0
    optimizer.close()


@pytest.mark.covers("groups added later")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("joins_at", [0, 1, 5])
def test_a_group_added_later_has_a_table_of_its_own(joins_at: int, overlap: bool) -> None:
    """Its phases and its turns at selection do not shift those of the others, nor theirs its."""
    later_shapes = ((50, 30), (30,), (300, 260))
    initial, later = start(), start(later_shapes)
    params = [nn.Parameter(weight.clone()) for weight in initial]
    config = {"update_interval": 3, "topk_ratio": 0.2, "select_interval": 4}
    optimizer = zenflow.ZenFlowAdamW(
        params, lr=1e-2, config=config | {"overlap_step": overlap, "host_threads": 3}
    )
    group = {"params": range(len(params)), "lr": 1e-2}
    oracle = Oracle(initial, [group], optimizer.config)
    for step in range(20):
        if step == joins_at:
            added = [nn.Parameter(weight.clone()) for weight in later]
            hyper = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
            optimizer.add_param_group(hyper | {"params": added})
            oracle.add_group(later, hyper)
            params += added
        train_both(step, 200 + step, params, optimizer, oracle)
    assert_same_state(params, optimizer, oracle)
    optimizer.close()


def as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def as_transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def as_rows_of_a_larger_one(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=1)[:, 0]


def as_columns_of_a_larger_one(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


STRIDES = {
    "channels last": (as_channels_last, (6, 12, 3, 3)),
    "transposed conv": (as_transposed, (6, 12, 3, 3)),
    "transposed matrix": (as_transposed, (40, 24)),
    "rows": (as_rows_of_a_larger_one, (40, 24)),
    "columns": (as_columns_of_a_larger_one, (40, 24)),
    "columns of a conv": (as_columns_of_a_larger_one, (6, 12, 3, 3)),
    "transposed and cut into blocks": (as_transposed, (700, 200)),
}


@pytest.mark.covers("shapes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STRIDES)
def test_strides_make_no_difference(name: str, dtype: torch.dtype) -> None:
    arrange, shape = STRIDES[name]
    (value,) = (weight.to(dtype) for weight in start((shape,)))
    params = [nn.Parameter(arrange(value.clone()))]
    assert not params[0].is_contiguous()
    config = {"update_interval": 2, "topk_ratio": 0.2, "select_interval": 2}
    optimizer = zenflow.ZenFlowAdamW(params, lr=1e-2, config=config)
    oracle = Oracle([value], [{"params": [0], "lr": 1e-2}], optimizer.config)
    for step in range(12):
        train_both(step, 300 + step, params, optimizer, oracle)
    assert optimizer._running_engine().weights  # it is split
    assert not params[0].is_contiguous()
    assert_same_state(params, optimizer, oracle)
    optimizer.close()


@pytest.mark.parametrize("name", STRIDES)
def test_a_gradient_of_any_strides_becomes_a_contiguous_slot(name: str) -> None:
    """Kernels are promised contiguous slots, and compiled ones read memory in order."""
    arrange, shape = STRIDES[name]
    (value,) = start((shape,))
    param = nn.Parameter(value.clone())
    optimizer = zenflow.ZenFlowAdamW(
        [param], lr=1e-2, config={"update_interval": 50, "topk_ratio": 0.2}
    )
    oracle = Oracle([value], [{"params": [0], "lr": 1e-2}], optimizer.config)
    numbers = torch.Generator().manual_seed(5)
    for step in range(4):
        grad = torch.randn(shape, generator=numbers)
        param.grad = arrange(grad.clone())
        assert not param.grad.is_contiguous()
        optimizer.step()
        oracle.step([grad])
        assert_same(step, [param], optimizer, oracle)
    slots = [
        s for segment in optimizer._running_engine().pipeline.segments for s in segment.waiting
    ]
    assert slots
    assert all(slot.grad.is_contiguous() for slot in slots)
    optimizer.synchronize()
    oracle.synchronize()
    assert_same(4, [param], optimizer, oracle)
    optimizer.close()


def test_strides_without_a_view_train_as_a_resident() -> None:
    """Height and width of a kernel exchanged: no ``[R, C, K]`` view exists, so all is on the device."""
    (value,) = start(((6, 12, 3, 5),))
    param = nn.Parameter(value.transpose(2, 3).contiguous().transpose(2, 3))
    expected = nn.Parameter(value.clone())
    optimizer = zenflow.ZenFlowAdamW([param], lr=1e-2, config={"update_interval": 4})
    resident = zenflow.ZenFlowAdamW([expected], lr=1e-2, config={"topk_ratio": 1})
    numbers = torch.Generator().manual_seed(1)
    for _ in range(8):
        grad = torch.randn(value.shape, generator=numbers)
        param.grad, expected.grad = grad.clone(), grad
        optimizer.step()
        resident.step()
        assert same_bits(param.detach(), expected.detach())
        assert optimizer.stats.staleness_steps == 0
    assert not optimizer._running_engine().weights
    optimizer.close()
    resident.close()
