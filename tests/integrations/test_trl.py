"""TRL's SFTTrainer, with nothing but the optimizer changed. (`zenflow finetune` is built on it.)"""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny import LR, SYNCHRONOUS, arguments, assert_close, copies, make_model, make_rows
from trl import SFTConfig, SFTTrainer

from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import ZenFlowCallback, unwrap_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from zenflow.cli.finetune.builtin import train_tokenizer

    return train_tokenizer(["a few words for a tokenizer that is not used"])


@pytest.mark.covers("TRL SFTTrainer", "streaming capture")
@pytest.mark.parametrize("stream", [False, True], ids=["at step", "streamed"])
@pytest.mark.parametrize("how", ["optimizer_cls_and_kwargs", "optimizers"])
def test_it_trains_as_with_adamw(how: str, stream: bool, tokenizer: Any, tmp_path: Path) -> None:
    """With accumulation and clipping, each of both kinds of capture."""
    results = []
    for optimizer, options in (
        (ZenFlowAdamW, {"lr": LR, "config": SYNCHRONOUS | {"stream_gradients": stream}}),
        (torch.optim.AdamW, {"lr": LR}),
    ):
        model = make_model()
        given: dict[str, Any] = {how: (optimizer, options)}
        if how == "optimizers":
            given = {how: (optimizer(model.parameters(), **options), None)}
        more = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "bf16": False}
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(tmp_path, **more), max_length=12),
            train_dataset=datasets.Dataset.from_list(make_rows()),
            processing_class=tokenizer,
            callbacks=[ZenFlowCallback()],
            **given,
        )
        trainer.train()
        inner = unwrap_optimizer(trainer.optimizer)
        if inner is not None:
            inner.close()
        results.append(copies(trainer.model))
    assert_close(*results)
