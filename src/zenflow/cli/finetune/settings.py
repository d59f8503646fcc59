"""What a run was asked to do: one frozen value, resolved and checked before anything is loaded."""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow.cli.errors import UsageError
from zenflow.config import ZenFlowConfig

OPTIMIZERS = ("zenflow", "adamw", "zero-offload")
ZENFLOW_KEYS = (
    *("topk_ratio", "update_interval", "max_update_interval", "select_interval"),
    *("full_warm_up_rounds", "overlap_step", "update_rule", "lookahead", "preview"),
    "host_threads",
)
"""Fields of :class:`ZenFlowConfig` with a flag of the same form. Not max_grad_norm: the trainer clips."""

DEFAULTS: dict[str, Any] = {
    "optimizer": "zenflow",
    "gradient_accumulation": 1,
    "lr_schedule": "linear",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "dtype": "auto",
    "device": "auto",
    "eval_fraction": 0.05,
    "seed": 0,
    "save_every": 500,
    "eval_every": 0,
    "selection_log": False,
}
GIVEN_MODEL: dict[str, Any] = {
    "lr": 2e-5,
    "warmup_steps": 0,
    "batch_size": 8,
    "max_length": 1024,
    "log_every": 10,
}
"""More defaults for a model given with --model: the usual ones of fine-tuning."""
GIVEN_MODEL_EPOCHS = 1.0
BUILT_IN: dict[str, Any] = {
    "lr": 1e-3,
    "warmup_steps": 10,
    "batch_size": 4,
    "max_length": 128,
    "log_every": 20,
}
"""More defaults for the built-in model: what a minute on two cores is best spent on."""
BUILT_IN_STEPS = 320

FREE_ON_RESUME = (
    *("max_steps", "epochs", "save_every", "eval_every", "log_every"),
    *("device", "gradient_checkpointing", "prompt", "selection_log"),
)
"""What may differ between a run and its continuation; anything else would make it another run."""
_PATHS = ("model", "data", "eval_data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of ``zenflow finetune``, as in its help; ``max_steps`` or ``epochs`` is None."""

    model: str | None
    data: str | None
    eval_data: str | None
    eval_fraction: float
    max_steps: int | None
    epochs: float | None
    batch_size: int
    gradient_accumulation: int
    max_length: int
    lr: float
    lr_schedule: str
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    dtype: str
    device: str
    gradient_checkpointing: bool | None
    optimizer: str
    zenflow: dict[str, Any]
    """The ZenFlow keys that were given; the others keep :class:`ZenFlowConfig`'s defaults."""
    seed: int
    save_every: int
    eval_every: int
    log_every: int
    prompt: str | None
    selection_log: bool

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> "Settings":
        """Settings from what was given, defaults for the rest.

        Raises:
            UsageError: for a ZenFlow key that is illegal or without effect.
        """
        defaults = DEFAULTS | (BUILT_IN if given.get("model") is None else GIVEN_MODEL)
        values = {field.name: None for field in dataclasses.fields(cls)} | defaults | dict(given)
        values["zenflow"] = dict(given.get("zenflow") or {})
        if values["max_steps"] is None and values["epochs"] is None:
            key, value = (
                ("max_steps", BUILT_IN_STEPS)
                if values["model"] is None
                else ("epochs", GIVEN_MODEL_EPOCHS)
            )
            values[key] = value
        settings = cls(**values)
        settings.optimizer_config()
        return settings

    def optimizer_config(self) -> ZenFlowConfig | None:
        """The config of the ZenFlow optimizer; None for ``--optimizer adamw``.

        Raises:
            UsageError: for a ZenFlow key that is illegal or without effect.
        """
        useful = {"zenflow": ZENFLOW_KEYS, "zero-offload": ("host_threads",), "adamw": ()}
        idle = [key for key in self.zenflow if key not in useful[self.optimizer]]
        if idle:
            raise UsageError(f"{flag(idle[0])} has no effect with --optimizer {self.optimizer}")
        if self.selection_log and self.optimizer != "zenflow":
            raise UsageError(f"--selection-log has no effect with --optimizer {self.optimizer}")
        if self.optimizer == "adamw":
            return None
        fixed: dict[str, Any] = {}
        if self.optimizer == "zero-offload":
            fixed = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False}
        try:
            return ZenFlowConfig(**(self.zenflow | fixed))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def to_json(self) -> dict[str, Any]:
        """The fields, JSON-ready; :meth:`resolve` makes the same settings of them."""
        return dataclasses.asdict(self)


def flag(key: str) -> str:
    """The command line's flag of a field."""
    return "--" + key.replace("_", "-")


def given_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives; local paths are made absolute."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"zenflow"}
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    for name in _PATHS:
        if name in given and Path(given[name]).expanduser().exists():
            given[name] = str(Path(given[name]).expanduser().resolve())
    zenflow = {key: getattr(arguments, key) for key in ZENFLOW_KEYS}
    given["zenflow"] = {key: value for key, value in zenflow.items() if value is not None}
    return given


def merge_for_resume(given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings of a run with those given for its continuation.

    Raises:
        UsageError: if one was given that would make it another run.
    """
    for key, value in given.items():
        if key == "zenflow":
            _refuse_changes(value, stored.get("zenflow", {}))
        elif key not in FREE_ON_RESUME:
            _refuse_changes({key: value}, stored)
    merged = {**stored, **given}
    merged["zenflow"] = {**stored.get("zenflow", {}), **given.get("zenflow", {})}
    if "max_steps" in given:
        merged["epochs"] = None
    elif "epochs" in given:
        merged["max_steps"] = None
    return merged


def _refuse_changes(given: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key != "host_threads" and value != stored.get(key):
            raise UsageError(
                f"{flag(key)} {value} differs from the run to resume, which has {stored.get(key)}; "
                "leave it out, or start a new run"
            )
