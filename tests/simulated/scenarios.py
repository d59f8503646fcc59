"""Short training runs that together reach every wait of the runtime."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.selection_log import SelectionLog, parse
from zenflow.runtime import pipeline
from zenflow.testing.oracle import Oracle
from zenflow.testing.simulated import Policy, Rates, SimulatedMachine, SimulatedTraining

SHAPES = ((12, 16), (9,), (16, 10), (8, 6, 2, 2))
RATES = Rates(
    forward_s=1.0,
    backward_s=2.0,
    to_host_bytes_per_s=1000.0,
    to_device_bytes_per_s=1000.0,
    sweep_s_per_element=1e-3,
    slot_s_per_element=1e-3,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run.

    Attributes:
        events: one letter each. ``s``: a step. ``p``: a step in which every second parameter has no
            gradient. ``x``: a step whose last gradient is not finite. ``h``: one with a gradient so
            large that its norm overflows. ``y``: ``synchronize()``.
            ``r``: save, and load what was saved. ``e``: the user writes a weight and a bias. ``d``:
            the same through ``.data``, which no version counts.
        max_streaming_bytes: how much may wait for the link in a streaming backward pass; None: as
            much as in life.
    """

    events: str
    config: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    dtype: torch.dtype = torch.float32
    num_workers: int = 1
    rates: Rates = RATES
    max_streaming_bytes: int | None = None

    def params(self) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=random) for shape in self.shapes]
        return [torch.nn.Parameter(value.to(self.dtype)) for value in values]

    def groups(self) -> list[dict[str, Any]]:
        params = self.params()
        return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 3e-2}]

    def grads(self, number: int) -> list[Tensor | None]:
        """The gradients of one event; a few channels stand out, and others from time to time."""
        random = torch.Generator().manual_seed(1 + number)
        event = self.events[number]
        grads: list[Tensor | None] = []
        for index, shape in enumerate(self.shapes):
            grad = torch.randn(shape, generator=random)
            if len(shape) > 1:
                channel = (torch.arange(shape[1]) + 3 * number) % shape[1]
                grad *= (1.0 + channel).reshape(-1, *[1] * (len(shape) - 2))
            missing = event == "p" and index % 2 == 1
            grads.append(None if missing else grad.to(self.dtype))
        if event == "h":
            assert grads[0] is not None
            grads[0].mul_(1e30)
        if event == "x":
            assert grads[-1] is not None
            grads[-1].view(-1)[3] = float("inf")
        return grads

    def zenflow_config(self) -> ZenFlowConfig:
        return ZenFlowConfig(host_threads=self.num_workers, **self.config)


def simulated(scenario: Scenario, policy: Policy, *, shared: bool = False) -> SimulatedTraining:
    """A training run that has gone through the scenario; ``seen`` ends with the weights after it and
    after a last ``synchronize()``."""
    machine = SimulatedMachine(
        policy, scenario.rates, shared=shared, num_workers=scenario.num_workers
    )
    training = SimulatedTraining(machine, scenario.groups(), scenario.zenflow_config())
    bound = scenario.max_streaming_bytes or pipeline._MAX_STREAMING_BYTES
    try:
        with mock.patch.object(pipeline, "_MAX_STREAMING_BYTES", bound):
            _go_through(scenario, training)
        training.seen.append(training.weights())
        training.optimizer.synchronize()
        training.seen.append(training.weights())
    finally:
        training.optimizer.abandon()
    return training


def _go_through(scenario: Scenario, training: SimulatedTraining) -> None:
    for number, event in enumerate(scenario.events):
        if event in "sphx":
            training.step(scenario.grads(number))
        elif event == "y":
            training.optimizer.synchronize()
            training.forward()
        elif event == "r":
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        elif event in "ed":
            training.edit(0, 0.5, counted=event == "e")
            training.edit(1, 0.5, counted=event == "e")


def expected(scenario: Scenario) -> list[list[Tensor]]:
    """What a training run has to see, by the oracle. Saving and loading must make no difference."""
    groups, start = [], 0
    for group in scenario.groups():
        stop = start + len(group["params"])
        groups.append({**group, "params": range(start, stop)})
        start = stop
    oracle = Oracle(scenario.params(), groups, scenario.zenflow_config())
    seen = []
    for number, event in enumerate(scenario.events):
        if event in "sphx":
            seen.append(oracle.weights())
            oracle.step(scenario.grads(number))
        elif event == "y":
            oracle.synchronize()
            seen.append(oracle.weights())
        elif event in "ed":
            for index in (0, 1):
                oracle.edit(index, oracle.weights()[index] * 0.5)
    seen.append(oracle.weights())
    oracle.synchronize()
    return [*seen, oracle.weights()]


def same(seen: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether two runs saw the same bits."""
    return len(seen) == len(other) and all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for weights, others in zip(seen, other, strict=True)
        for a, b in zip(weights, others, strict=True)
    )


EARLY = Policy(compute="early", links="early", workers="early")


def logged(scenario: Scenario, policy: Policy, *, shared: bool = False) -> SelectionLog:
    """What a run's selection log says."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "log")
        config = {**scenario.config, "selection_log": path}
        simulated(replace(scenario, config=config), policy, shared=shared)
        return parse(path.read_text().splitlines())


SELECTING = {"topk_ratio": 0.25, "select_interval": 2}
STREAMING = {**SELECTING, "stream_gradients": True}
SCENARIOS = {
    "plain": Scenario(events="s" * 12, config={"update_interval": 2, **SELECTING}),
    "every step": Scenario(
        events="s" * 8, config={"update_interval": 1, "topk_ratio": 0.5, "select_interval": 1}
    ),
    "accumulate": Scenario(
        events="ssssssyssss",
        config={"update_interval": 2, "update_rule": "accumulate", **SELECTING},
    ),
    "no lookahead": Scenario(
        events="ssyssyss", config={"update_interval": 1, "lookahead": False, **SELECTING}
    ),
    "all deferred": Scenario(events="ssssss", config={"update_interval": 2, "topk_ratio": 0}),
    "synchronous": Scenario(
        events="ssssss", config={"update_interval": 2, "overlap_step": False, **SELECTING}
    ),
    "skips": Scenario(events="ssxsshxxsshss", config={"update_interval": 2, **SELECTING}),
    "partial": Scenario(events="pspspsypspsps", config={"update_interval": 4, **SELECTING}),
    "resume": Scenario(events="ssrsrssrsyrss", config={"update_interval": 2, **SELECTING}),
    "resume bf16": Scenario(
        events="ssrsrssrsyrss", dtype=torch.bfloat16, config={"update_interval": 2, **SELECTING}
    ),
    "edits": Scenario(events="ssesssdsss" + "s" * 16, config={"update_interval": 3, **SELECTING}),
    "resume after edits": Scenario(
        events="sersssdrsss", config={"update_interval": 2, **SELECTING}
    ),
    "streaming": Scenario(events="ssxssxspxpss", config={"update_interval": 2, **STREAMING}),
    "streaming large gradients": Scenario(
        events="sshssxhss", config={"update_interval": 2, **STREAMING}
    ),
    "streaming in little room": Scenario(
        events="sssss", config={"update_interval": 2, **STREAMING}, max_streaming_bytes=500
    ),
    "streaming over a slow link": Scenario(
        events="ssxpxpxpsspxpss",
        shapes=((8, 16),) * 4,
        config={"update_interval": 2, **STREAMING},
        rates=replace(RATES, to_host_bytes_per_s=100.0),
    ),
    "streaming every step": Scenario(
        events="ssxssxssss", config={"update_interval": 1, "max_grad_norm": 1.0, **STREAMING}
    ),
    "clipping": Scenario(
        events="ssssss", config={"update_interval": 2, "max_grad_norm": 1.0, **SELECTING}
    ),
    "blocks": Scenario(
        events="ssssss",
        shapes=((300, 256), (9,), (16, 12)),
        config={"update_interval": 2, **SELECTING},
    ),
}
