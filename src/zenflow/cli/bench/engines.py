"""What trains a model in a child process: torch, this library, or DeepSpeed behind one interface."""

import dataclasses
import importlib
import multiprocessing
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zenflow.backends.link import Link
from zenflow.cli.bench.link import RatedLink
from zenflow.optimizer import ZenFlowAdamW
from zenflow.runtime.platform import Platform

LR = 1e-5
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01


class Engine(Protocol):
    """Two methods: a whole training step, and the end."""

    def step(self, inputs: Sequence[Tensor]) -> None:
        """Forward, backward, update."""
        ...

    def close(self) -> None:
        """Let go of threads and processes."""
        ...


class NoUpdate:
    """Forward and backward; the gradients are dropped."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(self, inputs: Sequence[Tensor]) -> None:
        self._model(*inputs).backward()
        self._model.zero_grad()

    def close(self) -> None:
        return None


class PlainEngine:
    """A plain loop around a ``torch.optim`` optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.optimizer = optimizer

    def step(self, inputs: Sequence[Tensor]) -> None:
        self._model(*inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        return None


class OurEngine(PlainEngine):
    """This library, and if it is asked for a link of a set rate."""

    optimizer: ZenFlowAdamW

    def __init__(
        self, model: nn.Module, settings: dict[str, Any], link_bytes_per_s: float | None
    ) -> None:
        self._link = None if link_bytes_per_s is None else RatedLink(link_bytes_per_s)
        super().__init__(model, _Linked(model, settings, self._link))

    def close(self) -> None:
        self.optimizer.close()
        if self._link is not None:
            self._link.close()


class _Linked(ZenFlowAdamW):
    def __init__(self, model: nn.Module, settings: dict[str, Any], link: Link | None) -> None:
        self._link = link
        super().__init__(model.parameters(), LR, BETAS, EPS, WEIGHT_DECAY, config=settings)

    def _make_platform(self, device: torch.device) -> Platform:
        platform = super()._make_platform(device)
        return platform if self._link is None else dataclasses.replace(platform, link=self._link)


class DeepSpeedEngine:
    """DeepSpeed, stage 2, optimizer offloaded to the CPU, bf16; with ZenFlow if it has settings."""

    def __init__(self, model: nn.Module, zenflow: dict[str, Any]) -> None:
        deepspeed = importlib.import_module("deepspeed")
        importlib.import_module("logging").getLogger("DeepSpeed").setLevel("WARNING")
        zero: dict[str, Any] = {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        }
        if zenflow:
            zero["zenflow"] = zenflow
        adamw = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": adamw},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )

    def step(self, inputs: Sequence[Tensor]) -> None:
        self._engine.backward(self._engine(*inputs))
        self._engine.step()

    def close(self) -> None:
        for child in multiprocessing.active_children():  # outlives the engine otherwise
            child.kill()


def make_engine(
    model: nn.Module, engine: str, settings: dict[str, Any], link_bytes_per_s: float | None
) -> Engine:
    """The engine that a contender names."""
    if engine == "none":
        return NoUpdate(model)
    if engine == "torch":
        optimizer = torch.optim.AdamW(
            model.parameters(), LR, BETAS, EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        return PlainEngine(model, optimizer)
    if engine == "zenflow":
        return OurEngine(model, settings, link_bytes_per_s)
    assert engine == "deepspeed", engine
    return DeepSpeedEngine(model, settings)
