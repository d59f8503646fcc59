"""The same training with DeepSpeed's engine, set up as its users do; in an interpreter that has it."""

import importlib
import importlib.util
import math
import multiprocessing
import os
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.methods import Method
from benchmarks.convergence.tasks.base import Task
from zenflow.cli.bench.interpreters import deepspeed_environment


def is_here() -> bool:
    """Whether this interpreter has DeepSpeed."""
    return importlib.util.find_spec("deepspeed") is not None


def train(task: Task, method: Method, lr: float, seed: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of all steps, and what the model is worth as it then is."""
    settings = task.settings
    model = task.model(seed).to(torch.bfloat16).train()
    engine = _engine(model, task, method, lr)
    torch.manual_seed(seed)
    losses: list[float] = []
    try:
        for step in range(1, settings.steps + 1):
            loss = task.loss(engine, task.batch(seed, step))
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                return losses, {"diverged_at": step}
            engine.backward(loss)
            engine.step()
        model.eval()
        heldout = {name: round(value, 6) for name, value in task.heldout(model).items()}
    finally:
        for child in multiprocessing.active_children():  # outlives the engine otherwise
            child.kill()
    return losses, {"heldout": heldout}


def _engine(model: nn.Module, task: Task, method: Method, lr: float) -> Any:
    os.environ.update(deepspeed_environment(sys.executable))
    deepspeed = importlib.import_module("deepspeed")
    settings = task.settings
    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    if method.deepspeed:
        zero["zenflow"] = method.deepspeed
    config = {
        "train_micro_batch_size_per_gpu": settings.batch,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "weight_decay": settings.weight_decay},
        },
        "gradient_clipping": settings.max_grad_norm if method.clip else 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        # Called with 0 for the first step.
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: settings.lr_factor(n + 1))

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config,
        lr_scheduler=schedule,
    )
    return engine
