"""The sizes of the experiments. What changes a figure is here, and so is in the hash of a run."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One task.

    Attributes:
        lrs: the grid that every method's learning rate is chosen from, ascending.
        middle: the learning rate that the first runs of the lesser methods use.
        seeds: of the data order, and of the initial weights where nothing is pretrained.
        max_grad_norm: clipping, for every method unless it says otherwise.
        decay: whether the learning rate falls linearly to zero; else it is constant.
        warmup: steps over which it rises linearly from zero.
        shape: of the model and the data, for the hash.
        expected_s: seconds of a run on one core, until there is one to learn from.
    """

    name: str
    title: str
    steps: int
    batch: int
    lrs: tuple[float, ...]
    middle: float
    seeds: int
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    decay: bool = True
    warmup: int = 0
    shape: dict[str, Any]
    expected_s: float

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by at a step, from 1."""
        factor = min(1.0, step / self.warmup) if self.warmup else 1.0
        if self.decay:
            factor *= 1 - max(0, step - 1 - self.warmup) / (self.steps - self.warmup)
        return factor

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that changes what a single run computes."""
        fields = dataclasses.asdict(self)
        for name in ("title", "lrs", "middle", "seeds", "expected_s"):
            del fields[name]
        return fields


PRETRAINING = {
    "vocab": 2048,
    "hidden": 320,
    "intermediate": 896,
    "layers": 4,
    "heads": 5,
    "kv_heads": 1,
    "initializer_range": 0.02,
    "tied": True,
    "steps": 1200,
    "batch": 16,
    "length": 64,
    "lr": 1e-3,
}

TASKS = {
    task.name: task
    for task in (
        TaskSettings(
            name="A",
            title="fine-tuning of a pretrained causal language model to source code",
            steps=300,
            batch=8,
            lrs=(5e-4, 1e-3, 2e-3),
            middle=1e-3,
            seeds=3,
            warmup=10,
            shape={"pretraining": PRETRAINING, "length": 64, "heldout": 128},
            expected_s=60,
        ),
        TaskSettings(
            name="B",
            title="all-MiniLM-L6-v2, sentiment of movie reviews",
            steps=220,
            batch=16,
            lrs=(5e-5, 1e-4, 2e-4),
            middle=1e-4,
            seeds=5,
            warmup=10,
            shape={"max_length": 48, "heldout": 2000},
            expected_s=200,
        ),
        TaskSettings(
            name="C",
            title="a byte-level language model from random weights at a high learning rate",
            steps=400,
            batch=16,
            lrs=(5e-4, 1e-3, 2e-3),
            middle=1e-3,
            seeds=3,
            decay=False,
            shape={
                "vocab": 256,
                "hidden": 192,
                "intermediate": 512,
                "layers": 4,
                "heads": 3,
                "kv_heads": 1,
                "initializer_range": 0.05,
                "tied": False,
                "length": 32,
                "heldout": 256,
            },
            expected_s=35,
        ),
    )
}


def digest(value: Any) -> str:
    """Eight hexadecimal digits of a JSON-ready value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
