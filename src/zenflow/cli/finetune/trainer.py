"""From settings to a TRL trainer: its loop, data handling, logging and checkpoints are used."""

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from zenflow.cli.finetune.rows import Rows
from zenflow.cli.finetune.settings import Settings
from zenflow.optimizer import ZenFlowAdamW

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_CHECKPOINTS_KEPT = 2  # the older one stays whole while the newer one is written


def quiet_libraries() -> None:
    """Leave the terminal to this command: errors only from the libraries below it."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    for name in ("trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\b")


def build_trainer(
    settings: Settings,
    *,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    train: Rows,
    heldout: Rows,
    device: torch.device,
    checkpoints: Path,
    selection_log: Path,
    callbacks: list["TrainerCallback"],
) -> SFTTrainer:
    """The trainer of a run, with the data tokenized and, for text, cut into full blocks."""
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_config(settings, train.form, device, checkpoints)),
        train_dataset=datasets.Dataset.from_list(train.rows),
        eval_dataset=datasets.Dataset.from_list(heldout.rows),
        processing_class=tokenizer,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=choose_optimizer(settings, selection_log),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def choose_optimizer(
    settings: Settings, selection_log: Path
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments besides the parameters."""
    config = settings.optimizer_config()
    arguments: dict[str, Any] = {"lr": settings.lr, "betas": _BETAS, "eps": _EPS}
    if config is None:
        return torch.optim.AdamW, arguments
    if settings.selection_log:
        config = replace(config, selection_log=selection_log)
    return ZenFlowAdamW, {**arguments, "config": config}


def total_steps(settings: Settings, trainer: SFTTrainer) -> int:
    """Optimizer steps of the whole run, counted as the trainer counts them."""
    if settings.max_steps is not None:
        return settings.max_steps
    assert settings.epochs is not None
    batches = len(trainer.get_train_dataloader())
    per_epoch = max(-(-batches // settings.gradient_accumulation), 1)
    return max(1, -int(-settings.epochs * per_epoch // 1))


def _config(
    settings: Settings, form: str, device: torch.device, checkpoints: Path
) -> dict[str, Any]:
    schedule = settings.lr_schedule
    if schedule == "constant" and settings.warmup_steps:
        schedule = "constant_with_warmup"
    checkpointing = settings.gradient_checkpointing
    packing = form == "text"
    return {
        "output_dir": str(checkpoints),
        "max_steps": settings.max_steps or -1,
        "num_train_epochs": settings.epochs or 1.0,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "learning_rate": settings.lr,
        "lr_scheduler_type": schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "gradient_checkpointing": device.type != "cpu" if checkpointing is None else checkpointing,
        # Weights have the dtype they are trained in; autocast is for float16, which needs scaling.
        "bf16": False,
        "fp16": settings.dtype == "float16",
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type != "cpu",
        "seed": settings.seed,
        "max_length": settings.max_length,
        "packing": packing,
        "eval_packing": packing,
        "packing_strategy": "wrapped",
        "logging_steps": settings.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a loss that is not finite is to be seen
        "save_strategy": "steps" if settings.save_every else "no",
        "save_steps": settings.save_every or 1,
        "save_total_limit": _CHECKPOINTS_KEPT,
        "eval_strategy": "steps" if settings.eval_every else "no",
        "eval_steps": settings.eval_every or None,
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
    }
