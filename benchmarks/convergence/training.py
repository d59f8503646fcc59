"""One run: a task, a method, a learning rate, a seed; what it gave as one JSON-ready dict."""

import math
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import zenflow
from benchmarks.convergence import deepspeed
from benchmarks.convergence.plan import Run
from benchmarks.convergence.tasks.base import Task
from benchmarks.convergence.variants import param_norm

CURVE_EVERY = 10


def train(run: Run, task: Task) -> dict[str, Any]:
    """Carry out a run in this process, with as many compute threads as torch has been given."""
    began_s = time.perf_counter()
    if run.how.deepspeed is None:
        losses, figures = _train(run, task)
    else:
        losses, figures = deepspeed.train(task, run.how, run.lr, run.seed)
    return {
        "task": run.task,
        "method": run.method,
        "lr": run.lr,
        "seed": run.seed,
        "settings": run.settings,
        **figures,
        "curve": thinned(losses),
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def _train(run: Run, task: Task) -> tuple[list[float], dict[str, Any]]:
    settings = task.settings
    model = task.model(run.seed)
    if run.how.bf16:
        model.to(torch.bfloat16)
    model.train()
    optimizer = run.how.optimizer(model.parameters(), run.lr, settings.weight_decay)
    torch.manual_seed(run.seed)  # of dropout
    losses: list[float] = []
    seen = Watch()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * settings.lr_factor(step)
        loss = task.loss(model, task.batch(run.seed, step))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return losses, {"diverged_at": step}
        loss.backward()
        if run.how.clip and settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.look(optimizer)
    if isinstance(optimizer, zenflow.ZenFlowAdamW):
        optimizer.close()
    model.eval()
    heldout = {name: round(value, 6) for name, value in task.heldout(model).items()}
    return losses, {
        "heldout": heldout,
        "param_norm": round(param_norm(model.parameters()), 6),
        **seen.figures(),
    }


class Watch:
    """What the optimizer said of its steps."""

    def __init__(self) -> None:
        self.intervals: list[list[int]] = []
        self.staleness: Counter[int] = Counter()
        self.reselected = 0
        self.skipped = 0

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step."""
        if not isinstance(optimizer, zenflow.ZenFlowAdamW):
            return
        stats = optimizer.stats
        if not self.intervals or self.intervals[-1][1] != stats.update_interval:
            self.intervals.append([stats.step, stats.update_interval])
        self.staleness[stats.staleness_steps] += 1
        self.reselected += stats.reselected_channels
        self.skipped += stats.skipped

    def figures(self) -> dict[str, Any]:
        """JSON-ready; empty if there was nothing to see."""
        if not self.intervals:
            return {}
        return {
            "intervals": self.intervals,
            "staleness": {str(steps): n for steps, n in sorted(self.staleness.items())},
            "reselected_channels": self.reselected,
            "skipped": self.skipped,
        }


def thinned(losses: list[float]) -> list[list[float]]:
    """``[last step, mean training loss]`` of each ten steps."""
    return [
        [i + len(part), round(sum(part) / len(part), 4)]
        for i in range(0, len(losses), CURVE_EVERY)
        if (part := losses[i : i + CURVE_EVERY])
    ]
