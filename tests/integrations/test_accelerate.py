"""Accelerate, with nothing but the optimizer changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tiny import LR, OVERLAPPED, SYNCHRONOUS, assert_close, assert_same_bits, copies
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import unwrap_optimizer

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_state")

STREAMED = OVERLAPPED | {"stream_gradients": True, "max_grad_norm": 0.05}


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process."""
    for wait in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if wait:
            yield


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))


class Run:
    """A model, an optimizer, a schedule and data, prepared."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        config: dict[str, Any] | None = None,
        *,
        accumulation: int = 1,
        precision: str = "no",
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision
        )
        model = make_model()
        if config is not None:
            options["config"] = config
        if options.pop("give_model", False):
            options["model"] = model
        inner = optimizer(model.parameters(), lr=LR, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 30)
        rows = list(torch.randn(96, 20, generator=torch.Generator().manual_seed(0)))
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, inner, schedule, DataLoader(rows, batch_size=4)
        )

    def train(self, *, clip: float | None = None, skip: int = 0, stop: int | None = None) -> None:
        """One pass over the batches, from ``skip`` to ``stop``."""
        for number, x in enumerate(self.loader):
            if number < skip or (stop is not None and number >= stop):
                continue
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - x).float().square().mean()
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """As trained, whatever still waits included."""
        inner = unwrap_optimizer(self.optimizer)
        if inner is not None:
            inner.close()
        return copies(self.model)


@pytest.mark.covers("Accelerate", "clipping", "several backward passes")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_it_trains_as_with_adamw(accumulation: int, clip: float | None, precision: str) -> None:
    """24 batches: with 5 to a step, the last step has the 4 that are left."""
    runs = [
        Run(ZenFlowAdamW, SYNCHRONOUS, accumulation=accumulation, precision=precision),
        Run(torch.optim.AdamW, accumulation=accumulation, precision=precision),
    ]
    for run in runs:
        run.train(clip=clip)
    # A difference of one fp32 rounding grows where weights are then rounded to bf16.
    assert_close(*[run.weights() for run in runs], atol=1e-3 if precision == "bf16" else 1e-6)
    assert runs[0].schedule.get_last_lr() == runs[1].schedule.get_last_lr()


@pytest.mark.covers("Accelerate", "streaming capture")
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_streamed_gradients_accumulate_by_accelerates_own_flag(accumulation: int) -> None:
    results = []
    for stream in (True, False):
        config = STREAMED | {"stream_gradients": stream, "preview": False}
        run = Run(ZenFlowAdamW, config, accumulation=accumulation)
        run.train()
        inner = unwrap_optimizer(run.optimizer)
        assert inner is not None and inner.stats.step == -(-24 // accumulation)
        results.append(run.weights())
    assert_same_bits(*results)


@pytest.mark.covers("Accelerate")
def test_accelerates_clipping_is_honoured_when_streamed() -> None:
    results = []
    for stream in (True, False):
        run = Run(ZenFlowAdamW, OVERLAPPED | {"stream_gradients": stream, "preview": False})
        run.train(clip=0.05)
        results.append(run.weights())
    assert_close(*results, atol=2e-6)


@pytest.mark.covers("Accelerate", "resume")
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED, STREAMED])
@pytest.mark.parametrize("at", [1, 8, 11])
def test_a_saved_state_resumes_with_the_same_bits(
    config: dict[str, Any], at: int, tmp_path: Path
) -> None:
    """From any point of a window, through ``save_state`` and ``load_state``."""
    whole = Run(ZenFlowAdamW, config)
    whole.train(stop=at)
    whole.accelerator.save_state(str(tmp_path))
    whole.train(skip=at)
    resumed = Run(ZenFlowAdamW, config)
    with torch.no_grad():
        for param in resumed.model.parameters():
            param.zero_()
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(skip=at)
    assert_same_bits(resumed.weights(), whole.weights())


@pytest.mark.covers("Accelerate", "pending steps")
def test_with_the_model_given_weights_are_current_when_evaluated_and_saved(tmp_path: Path) -> None:
    run = Run(ZenFlowAdamW, OVERLAPPED, give_model=True)
    inner = unwrap_optimizer(run.optimizer)
    assert inner is not None
    run.train(stop=8)
    assert inner.stats.staleness_steps > 0
    run.model.eval()
    run.model(torch.zeros(1, 20))
    assert inner.stats.staleness_steps == 0
    run.model.train()
    run.train(skip=8, stop=16)
    assert inner.stats.staleness_steps > 0
    run.accelerator.save_model(run.model, str(tmp_path))
    assert inner.stats.staleness_steps == 0
    run.weights()
