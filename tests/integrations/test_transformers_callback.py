"""`ZenFlowCallback` in a plain Hugging Face Trainer: evaluations and saves see current weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import RunTotals, ZenFlowCallback, unwrap_optimizer


class Witness(TrainerCallback):
    """Notes, at each evaluation and save, whether anything was still to be applied."""

    def __init__(self) -> None:
        self.current: list[bool] = []

    def on_evaluate(self, *arguments: Any, **kwargs: Any) -> None:
        self._look(kwargs["model"], kwargs["optimizer"])

    def on_save(self, *arguments: Any, **kwargs: Any) -> None:
        self._look(kwargs["model"], kwargs["optimizer"])

    def _look(self, model: torch.nn.Module, optimizer: object) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        inner = unwrap_optimizer(optimizer)
        assert inner is not None
        inner.synchronize()
        after = list(model.parameters())
        self.current.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def train(tmp_path: Path, callbacks: list[TrainerCallback], **more: Any) -> Trainer:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 16)).tolist()]
    arguments = {
        "max_steps": 9,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 100,
    }
    trainer = Trainer(
        model=Qwen2ForCausalLM(config),
        args=TrainingArguments(output_dir=str(tmp_path), **(arguments | more)),
        train_dataset=rows,
        eval_dataset=rows[:4],
        optimizer_cls_and_kwargs=(
            ZenFlowAdamW,
            {"lr": 1e-2, "config": {"update_interval": 3, "topk_ratio": 0.1}},
        ),
        callbacks=callbacks,
    )
    trainer.train()
    optimizer = unwrap_optimizer(trainer.optimizer)
    assert optimizer is not None
    optimizer.close()
    return trainer


@pytest.mark.covers("pending steps", "Hugging Face Trainer")
def test_weights_are_current_at_every_evaluation_and_save(tmp_path: Path) -> None:
    witness, callback = Witness(), ZenFlowCallback()
    train(tmp_path, [callback, witness])
    assert witness.current == [True] * 7  # evaluations 2, 4, 6, 8 and at the end; saves 5 and 9
    totals = callback.totals
    assert totals.steps == 9
    assert totals.staleness_max_steps > 0
    assert 0 < totals.traffic_per_step < 2
    assert totals.loop_s > 0
    assert RunTotals(**totals.to_dict()) == totals


def test_weights_are_current_at_the_end_of_epochs(tmp_path: Path) -> None:
    witness = Witness()
    train(
        tmp_path,
        [ZenFlowCallback(), witness],
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="epoch",
    )
    assert witness.current == [True] * 4


@pytest.mark.covers("pending steps", "Hugging Face Trainer")
def test_they_are_without_the_callback_too(tmp_path: Path) -> None:
    """The trainer tells its optimizer when it trains, and the optimizer finds the model."""
    witness = Witness()
    trainer = train(tmp_path, [witness])
    assert witness.current == [True] * 7
    saved = load_file(tmp_path / "checkpoint-9" / "model.safetensors")
    for name, param in trainer.model.named_parameters():
        if name in saved:  # without those that are tied
            assert torch.equal(saved[name], param), name


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD([torch.zeros(1)], lr=1)])
def test_other_optimizers_are_left_alone(optimizer: object) -> None:
    assert unwrap_optimizer(optimizer) is None
