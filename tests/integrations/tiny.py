"""A causal language model of a few thousand weights, its rows, and what tests of trainers compare."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments

SYNCHRONOUS: dict[str, Any] = {
    "overlap_step": False,
    "update_interval": 1,
    "select_interval": 3,
    "topk_ratio": 0.2,
}
OVERLAPPED: dict[str, Any] = {"update_interval": 3, "select_interval": 3, "topk_ratio": 0.2}
LR = 1e-2


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_rows(count: int = 48) -> list[dict[str, list[int]]]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (count, 12), generator=random).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(output: Path, **more: Any) -> dict[str, Any]:
    """What ``TrainingArguments`` needs for a short, quiet run on the CPU."""
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 9,
        "learning_rate": LR,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return defaults | more


def training_arguments(output: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(**arguments(output, **more))


def copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same_bits(one: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    for number, (param, expected) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(param, expected), number


def assert_close(one: Iterable[Tensor], other: Iterable[Tensor], atol: float = 1e-6) -> None:
    for param, expected in zip(one, other, strict=True):
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=atol)
