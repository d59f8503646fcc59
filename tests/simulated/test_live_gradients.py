"""How many bytes of gradients the device holds at once in a backward pass.

At step it is the whole model's. Streamed it is a few layers': what autograd has just made, and what the
link has not carried away yet, which is bounded.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenflow.config import ZenFlowConfig
from zenflow.runtime import pipeline
from zenflow.runtime.streaming import GradientStream
from zenflow.testing.simulated import (
    Policy,
    Rates,
    SimulatedMachine,
    SimulatedTraining,
    SimulatedZenFlowAdamW,
)

NUM_LAYERS = 24
WIDTH = 32
LAYER_BYTES = WIDTH * WIDTH * 4
MODEL_BYTES = NUM_LAYERS * LAYER_BYTES
FEW = 4 * LAYER_BYTES

Change = Callable[[pytest.MonkeyPatch], None]


def do_nothing(_: pytest.MonkeyPatch) -> None:
    pass


def without_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientStream, "attach", lambda *_: None)


def without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline, "_MAX_STREAMING_BYTES", 1 << 60)


def device_peak_bytes(patch: pytest.MonkeyPatch, *, stream: bool, to_host_s: float) -> int:
    """Most device memory in use in a backward pass, above what is in use before it.

    Args:
        to_host_s: how long the link takes for one layer; the device makes one in a second.
    """
    rates = Rates(backward_s=float(NUM_LAYERS), to_host_bytes_per_s=LAYER_BYTES / to_host_s)
    machine = SimulatedMachine(Policy(), rates)
    live, peak = 0, 0
    take, give_back = machine.memory.empty, machine.memory._release

    def counted_take(shape: Any, dtype: torch.dtype) -> Tensor:
        nonlocal live, peak
        tensor = take(shape, dtype)
        live += tensor.nbytes
        peak = max(peak, live)
        return tensor

    def counted_give_back(block: Any) -> None:
        nonlocal live
        live -= len(block.content)
        give_back(block)

    patch.setattr(machine.memory, "empty", counted_take)
    patch.setattr(machine.memory, "_release", counted_give_back)
    params = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(NUM_LAYERS)]
    config = ZenFlowConfig(update_interval=2, topk_ratio=0.0, stream_gradients=stream)
    training = SimulatedTraining(machine, [{"params": params}], config)
    grads = [torch.randn(WIDTH, WIDTH) for _ in params]
    for _ in range(4):
        training.step(grads)
    before = peak = live
    training.backward(grads)
    in_backward = peak - before
    training.optimizer.step()
    return in_backward


@pytest.mark.covers("streaming capture")
@pytest.mark.parametrize("to_host_s", [0.5, 3.0], ids=["fast link", "slow link"])
def test_the_device_holds_a_few_layers_gradients(
    to_host_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that is too slow makes the backward pass wait, and takes no more memory."""
    monkeypatch.setattr(pipeline, "_MAX_STREAMING_BYTES", 2 * LAYER_BYTES)
    assert device_peak_bytes(monkeypatch, stream=True, to_host_s=to_host_s) <= FEW
    at_step = device_peak_bytes(monkeypatch, stream=False, to_host_s=to_host_s)
    assert at_step == MODEL_BYTES


@pytest.mark.parametrize("change", [without_hooks, without_bound])
def test_without_what_bounds_it_the_model_would_be_seen(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_MAX_STREAMING_BYTES", 2 * LAYER_BYTES)
    change(monkeypatch)
    peak = device_peak_bytes(monkeypatch, stream=True, to_host_s=20.0)
    assert peak > MODEL_BYTES / 2


def autograd_peak_bytes(*, stream: bool) -> int:
    """Most bytes of gradients alive at once in a real backward pass, on a link without delay."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    live, peak = 0, 0

    def count(param: Tensor) -> None:
        nonlocal live, peak
        assert param.grad is not None
        live += LAYER_BYTES
        peak = max(peak, live)
        weakref.finalize(param.grad.untyped_storage(), forget)

    def forget() -> None:
        nonlocal live
        live -= LAYER_BYTES

    for param in model.parameters():  # before the optimizer's own hooks
        param.register_post_accumulate_grad_hook(count)
    machine = SimulatedMachine(Policy(compute="early", links="early"))
    config = ZenFlowConfig(update_interval=2, topk_ratio=0.1, stream_gradients=stream)
    optimizer = SimulatedZenFlowAdamW(machine, model.parameters(), config=config)
    for _ in range(3):
        peak = live
        model(torch.randn(4, WIDTH)).square().sum().backward()
        in_backward = peak
        optimizer.step()
    optimizer.abandon()
    return in_backward


@pytest.mark.covers("streaming capture")
def test_a_real_backward_pass_keeps_a_few_layers_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autograd_peak_bytes(stream=False) == MODEL_BYTES
    assert autograd_peak_bytes(stream=True) <= FEW
    without_hooks(monkeypatch)
    assert autograd_peak_bytes(stream=True) == MODEL_BYTES
