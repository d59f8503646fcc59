"""The peak of device memory is at most what docs/design.md, "Device bytes", says."""

from typing import Any

import pytest
import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.core.budget import DeviceNeed, Split, device_need
from zenflow.core.selection import num_selected
from zenflow.testing.simulated import Policy, Rates, SimulatedMachine, SimulatedTraining

ROWS, CHANNELS = 64, 400  # one segment each
NUM_WEIGHTS, BIAS = 8, 64
RATIO = 0.1
STREAMING_BYTES = ROWS * CHANNELS * 2


def peak_of_a_run(interval: int, streaming: bool, to_host_bytes_per_s: float) -> int:
    """Bytes allocated on the device at once, in the steady state. Weights are not the device's here,
    nor are torch's own temporaries."""
    rates = Rates(
        forward_s=1.0,
        backward_s=2.0,
        to_host_bytes_per_s=to_host_bytes_per_s,
        to_device_bytes_per_s=1e9,
    )
    machine = SimulatedMachine(Policy(compute="early", links="early", workers="late"), rates)
    shapes = [(ROWS, CHANNELS)] * NUM_WEIGHTS + [(BIAS,)]
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    config: dict[str, Any] = {"topk_ratio": RATIO, "update_interval": interval}
    config |= {"select_interval": 3, "stream_gradients": streaming, "host_threads": 1}
    training = SimulatedTraining(machine, [{"params": params}], ZenFlowConfig(**config))
    grads = [torch.randn_like(param) for param in params]
    for step in range(10):
        if step == 6:
            machine.memory.peak_bytes = machine.memory.in_use_bytes
        training.step(grads)
    training.optimizer.abandon()
    return machine.memory.peak_bytes


def need(interval: int, streaming: bool) -> DeviceNeed:
    split = [Split(ROWS, CHANNELS, 1, num_selected(CHANNELS, RATIO))] * NUM_WEIGHTS
    streaming_bytes = STREAMING_BYTES if streaming else None
    return device_need(split, [BIAS], 2, interval, streaming_bytes=streaming_bytes)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("to_host_bytes_per_s", [1e9, 1e6])
def test_the_peak_is_within_the_formula(
    interval: int,
    streaming: bool,
    to_host_bytes_per_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zenflow.runtime.pipeline._MAX_STREAMING_BYTES", STREAMING_BYTES)
    peak = peak_of_a_run(interval, streaming, to_host_bytes_per_s)
    wanted = need(interval, streaming)._replace(weights=0, update=0, scoring=0, preview=0)
    assert peak <= wanted.peak
    assert peak >= wanted.peak - wanted.gradients - wanted.gathered - wanted.staging
