"""The Hugging Face Trainer, with nothing but the optimizer changed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    LR,
    OVERLAPPED,
    SYNCHRONOUS,
    assert_close,
    assert_same_bits,
    copies,
    make_model,
    make_rows,
    training_arguments,
)
from torch import nn
from transformers import Trainer, get_scheduler

from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import ZenFlowCallback, unwrap_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(
    output: Path,
    optimizer: type[torch.optim.Optimizer],
    config: dict[str, Any] | None = None,
    *,
    how: str = "optimizer_cls_and_kwargs",
    callback: bool = True,
    give_model: bool = False,
    **more: Any,
) -> Trainer:
    model = make_model()
    options: dict[str, Any] = {"lr": LR} | ({} if config is None else {"config": config})
    if give_model:
        options["model"] = model
    given: dict[str, Any] = {"optimizer_cls_and_kwargs": (optimizer, options)}
    if how == "optimizers":
        built = optimizer(model.parameters(), **options)
        given = {"optimizers": (built, get_scheduler("cosine", built, 2, more.get("max_steps", 9)))}
    return Trainer(
        model=model,
        args=training_arguments(output, **more),
        train_dataset=make_rows(),
        eval_dataset=make_rows(8),
        callbacks=[ZenFlowCallback()] if callback else [],
        **given,
    )


def train(trainer: Trainer, resume: str | None = None) -> list[torch.Tensor]:
    trainer.train(resume_from_checkpoint=resume)
    optimizer = unwrap_optimizer(trainer.optimizer)
    if optimizer is not None:
        optimizer.close()
    return copies(trainer.model)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


CASES: dict[str, dict[str, Any]] = {
    "optimizer_cls_and_kwargs": {},
    "optimizers": {"how": "optimizers"},
    "clipping": {"max_grad_norm": 0.05},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 6},
    "accumulation with a rest": {
        "gradient_accumulation_steps": 5,  # 12 batches an epoch: two windows of five and one of two
        "max_steps": -1,
        "num_train_epochs": 2,
    },
    "warm-up, cosine, decay": {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.3,
    },
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "neftune, smoothing": {"neftune_noise_alpha": 0.1, "label_smoothing_factor": 0.1},
}


@pytest.mark.covers("Hugging Face Trainer", "clipping")
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_with_adamw(case: str, tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, ZenFlowAdamW, SYNCHRONOUS, **CASES[case])
    weights = train(ours)
    plain = make_trainer(tmp_path, torch.optim.AdamW, **CASES[case])
    assert_close(weights, train(plain))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert len(logged(plain, name)) > 5
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=1e-3)


@pytest.mark.covers("Hugging Face Trainer")
def test_autocast_trains_as_with_adamw(tmp_path: Path) -> None:
    """Rounding to bf16 makes more of a difference of one fp32 rounding."""
    ours = make_trainer(tmp_path, ZenFlowAdamW, SYNCHRONOUS, bf16=True)
    plain = make_trainer(tmp_path, torch.optim.AdamW, bf16=True)
    assert_close(train(ours), train(plain), atol=1e-3)
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-3)


@pytest.mark.covers("Hugging Face Trainer", "resume")
@pytest.mark.parametrize("callback", [True, False], ids=["callback", "no callback"])
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    config: dict[str, Any], callback: bool, accumulation: int, tmp_path: Path
) -> None:
    more = {
        "callback": callback,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps",
        "save_steps": 4,
        "max_steps": 11,
        "warmup_steps": 3,
    }
    whole = make_trainer(tmp_path / "whole", ZenFlowAdamW, config, **more)
    expected = train(whole)
    resumed = make_trainer(tmp_path / "resumed", ZenFlowAdamW, config, **more)
    assert_same_bits(train(resumed, str(tmp_path / "whole" / "checkpoint-4")), expected)
    assert logged(resumed, "loss") == logged(whole, "loss")


def evaluate(weights: dict[str, torch.Tensor], trainer: Trainer) -> float:
    """The loss of these weights, by a trainer of its own."""
    model = make_model()
    model.load_state_dict(weights, strict=False)
    other = Trainer(model=model, args=trainer.args, eval_dataset=make_rows(8))
    return float(other.evaluate()["eval_loss"])


@pytest.mark.covers("Hugging Face Trainer", "exported weights", "pending steps")
@pytest.mark.parametrize("stream", [False, True], ids=["at step", "streamed"])
@pytest.mark.parametrize("how", ["callback", "model given", "nothing but the optimizer"])
def test_the_best_model_is_kept_and_loaded(how: str, stream: bool, tmp_path: Path) -> None:
    """Weights are current when they are evaluated and saved: by the callback, or by hooks."""
    trainer = make_trainer(
        tmp_path,
        ZenFlowAdamW,
        OVERLAPPED | {"stream_gradients": stream},
        how="optimizers",
        callback=how == "callback",
        give_model=how == "model given",
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        learning_rate=3e-2,
        max_steps=14,
    )
    train(trainer)
    best = trainer.state.best_metric
    assert best == min(logged(trainer, "eval_loss"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)
    kept = sorted(path for path in tmp_path.glob("checkpoint-*"))
    assert len(kept) == 2
    assert trainer.state.best_model_checkpoint in map(str, kept)
    for path in kept:  # each holds the weights that were evaluated at its step
        entries = json.loads((path / "trainer_state.json").read_text("utf-8"))["log_history"]
        (loss,) = [
            entry["eval_loss"]
            for entry in entries
            if "eval_loss" in entry and entry["step"] == int(path.name.partition("-")[2])
        ]
        assert evaluate(load_file(path / "model.safetensors"), trainer) == pytest.approx(loss)


STREAMED = OVERLAPPED | {"stream_gradients": True, "max_grad_norm": 0.5}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_streamed_gradients_have_the_same_bits(accumulation: int, tmp_path: Path) -> None:
    """With the trainer's own clipping off; Accelerate says which backward pass is the last."""
    more = {"max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation, "max_steps": 7}
    streamed = make_trainer(tmp_path, ZenFlowAdamW, STREAMED, **more)
    config = STREAMED | {"stream_gradients": False, "preview": False}
    assert_same_bits(train(streamed), train(make_trainer(tmp_path, ZenFlowAdamW, config, **more)))


@pytest.mark.covers("Hugging Face Trainer", "clipping")
@pytest.mark.parametrize("bound", [None, 0.03])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_trainers_own_clipping_is_honoured_when_streamed(
    accumulation: int, bound: float | None, tmp_path: Path
) -> None:
    """Beside ``max_grad_norm`` of the config, too: that bounds what the trainer has clipped."""
    results = []
    for stream in (True, False):
        config = OVERLAPPED | {"stream_gradients": stream, "max_grad_norm": bound, "preview": False}
        more = {"max_grad_norm": 0.05, "gradient_accumulation_steps": accumulation, "max_steps": 6}
        results.append(train(make_trainer(tmp_path, ZenFlowAdamW, config, **more)))
    assert_close(*results, atol=2e-6)


@pytest.mark.covers("Hugging Face Trainer")
@pytest.mark.parametrize("stream", [False, True], ids=["at step", "streamed"])
def test_a_trainer_may_train_again(stream: bool, tmp_path: Path) -> None:
    """It then makes a new optimizer for the same parameters, and drops the old one."""
    config = SYNCHRONOUS | {"stream_gradients": stream}
    trainers = [
        make_trainer(tmp_path, ZenFlowAdamW, config),
        make_trainer(tmp_path, torch.optim.AdamW),
    ]
    for trainer in trainers:
        trainer.train()
    assert_close(*[train(trainer) for trainer in trainers])


def test_a_frozen_part_stays(tmp_path: Path) -> None:
    """As fine-tuning with frozen embeddings does; Trainer gives such parameters to the optimizer too."""
    trainers = []
    for optimizer, config in ((ZenFlowAdamW, SYNCHRONOUS), (torch.optim.AdamW, None)):
        trainer = make_trainer(tmp_path, optimizer, config)
        assert isinstance(trainer.model, nn.Module)
        trainer.model.get_input_embeddings().requires_grad_(False)
        before = trainer.model.get_input_embeddings().weight.clone()
        train(trainer)
        assert torch.equal(trainer.model.get_input_embeddings().weight, before)
        trainers.append(trainer)
    assert_close(*[copies(trainer.model) for trainer in trainers])
