"""Loading the tokenizer and the model, and what they need of device, dtype and disk."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zenflow.cli.errors import UsageError, one_line
from zenflow.cli.finetune.builtin import new_model, train_tokenizer
from zenflow.cli.finetune.rows import Rows
from zenflow.cli.finetune.settings import Settings
from zenflow.cli.finetune.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHECKPOINTS_ON_DISK = 3  # two are kept while the next is written
_STATE_BYTES = 12  # fp32 master and two moments for a weight


def choose_device(wanted: str) -> torch.device:
    """The device to train on.

    Raises:
        UsageError: if it is not there, if it is not clear which, or if there are several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("zenflow finetune runs in one process; start it without torchrun")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    if torch.cuda.device_count() > 1:
        raise UsageError(
            f"{torch.cuda.device_count()} CUDA devices are visible and one is used; "
            "choose it with CUDA_VISIBLE_DEVICES=0"
        )
    return torch.device("cuda")


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights.

    Raises:
        UsageError: if the device cannot train in it.
    """
    if device.type == "cpu":
        if wanted == "float16":
            raise UsageError("--dtype float16 needs an accelerator; on the CPU use bfloat16")
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if wanted == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise UsageError("--dtype bfloat16: this CUDA device does not support it; use float16")
    if wanted == "bfloat16" or (wanted == "auto" and torch.cuda.is_bf16_supported()):
        return torch.bfloat16
    return torch.float32


def load_tokenizer(
    source: Source, rows: Rows, checkpoint: Path | None
) -> "PreTrainedTokenizerBase":
    """The model's tokenizer; for the built-in model one trained on the data, or its checkpoint's.

    Raises:
        UsageError: if it cannot be loaded or lacks what the data needs.
    """
    if source.value is None and checkpoint is None:
        return train_tokenizer(text_of(row) for row in rows.rows)
    from transformers import AutoTokenizer

    where = str(source.local or source.value or checkpoint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except Exception as error:
        raise _cannot_load("tokenizer", source, error) from error
    if tokenizer.eos_token is None:
        raise UsageError(f"the tokenizer of {where} has no end-of-text token, which training needs")
    conversational = rows.form == "messages" or isinstance(rows.rows[0].get("prompt"), list)
    if conversational and not tokenizer.chat_template:
        raise UsageError(
            f"the data has messages, but the tokenizer of {where} has no chat template; "
            "give an instruct model, or data with text"
        )
    return tokenizer


def load_model(
    settings: Settings,
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    dtype: torch.dtype,
) -> "PreTrainedModel":
    """The model to train, on the CPU, as it was at the start of the run.

    A resumed run gets its weights from the trainer. Loading the model itself from a checkpoint
    would not do: its config has a padding token by then, whose embedding torch then freezes.

    Raises:
        UsageError: if it cannot be loaded.
    """
    if source.value is None:
        return new_model(tokenizer, settings.max_length).to(dtype)
    from transformers import AutoModelForCausalLM

    where = str(source.local or source.value)
    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
    except Exception as error:
        raise _cannot_load("model", source, error) from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer of {where} has {len(tokenizer)} tokens, its model only {rows}"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.max_length > longest:
        raise UsageError(f"--max-length {settings.max_length} exceeds the model's {longest}")
    return model


def disk_bytes(model: "PreTrainedModel", *, checkpoints: bool) -> int:
    """Bytes on disk that a run's model and checkpoints take at most."""
    weights: int = sum(p.numel() * p.element_size() for p in model.parameters())
    state: int = sum(p.numel() for p in model.parameters()) * _STATE_BYTES
    return weights + (_CHECKPOINTS_ON_DISK * (weights + state) if checkpoints else 0)


def text_of(row: dict[str, Any]) -> str:
    """All text of a row, of any form."""
    parts: list[str] = []
    for value in row.values():
        messages = value if isinstance(value, list) else [{"content": value}]
        parts.extend(message["content"] for message in messages)
    return "\n".join(parts)


def _cannot_load(what: str, source: Source, error: Exception) -> UsageError:
    if source.local is not None or source.value is None:
        return UsageError(f"cannot load the {what} of --model {source.value}: {one_line(error)}")
    return UsageError(
        f"cannot load the {what} of --model {source.value}: there is no such directory here, and "
        f"the hub model of that name failed: {one_line(error)}"
    )
