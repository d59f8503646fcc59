"""Tasks A and C: small causal language models of the Qwen2 architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.convergence.settings import PRETRAINING, TASKS, TaskSettings, digest
from benchmarks.convergence.tasks.base import step_seed
from benchmarks.convergence.tasks.text import prepare_tokens, tokens

_EVALUATED_AT_ONCE = 16


def new_model(shape: dict[str, Any], seed: int) -> nn.Module:
    """A Qwen2 model with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=shape["tied"],
        initializer_range=shape["initializer_range"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def windows(ids: Tensor, length: int, count: int, seed: int) -> Tensor:
    """``count`` random windows of ``length + 1`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator)
    return ids[starts + torch.arange(length + 1)]


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each next token."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class _Language:
    """What both tasks share.

    Args:
        kind: of text, see :func:`tokens`.
    """

    settings: TaskSettings

    def __init__(self, cache: Path, kind: str) -> None:
        self.cache = cache
        self.length = self.settings.shape["length"]
        self.train, heldout = tokens(kind, cache)
        self.checked = windows(heldout, self.length, self.settings.shape["heldout"], seed=0)

    def batch(self, seed: int, step: int) -> Tensor:
        return windows(self.train, self.length, self.settings.batch, step_seed(seed, step))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return language_loss(model, batch)

    @torch.no_grad()
    def heldout(self, model: nn.Module) -> dict[str, float]:
        parts = self.checked.split(_EVALUATED_AT_ONCE)
        losses = [language_loss(model, part).item() for part in parts]
        return {"loss": sum(losses) / len(losses)}


class FineTuning(_Language):
    """Task A: pretrained on documentation by this bench, fine-tuned to source code."""

    settings = TASKS["A"]

    def __init__(self, cache: Path) -> None:
        super().__init__(cache, "source")

    def model(self, seed: int) -> nn.Module:
        model = new_model(PRETRAINING, seed)
        model.load_state_dict(torch.load(_checkpoint(self.cache)))
        return model


class FromScratch(_Language):
    """Task C: the bytes of the documentation, from random weights."""

    settings = TASKS["C"]

    def __init__(self, cache: Path) -> None:
        super().__init__(cache, "bytes")

    def model(self, seed: int) -> nn.Module:
        return new_model(self.settings.shape, seed)


def prepare(cache: Path, say: Callable[[str], None], *, pretrain: bool) -> None:
    """Texts, and for task A the pretrained model, made once."""
    prepare_tokens(cache, PRETRAINING["vocab"])
    if pretrain and not _checkpoint(cache).exists():
        _pretrain(cache, say)


def _checkpoint(cache: Path) -> Path:
    return cache / f"pretrained-{digest(PRETRAINING)}.pt"


def _pretrain(cache: Path, say: Callable[[str], None]) -> None:
    shape = PRETRAINING
    train, _ = tokens("documentation", cache)
    model = new_model(shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), shape["lr"], betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, shape["lr"], shape["steps"], pct_start=0.1
    )
    for step in range(1, shape["steps"] + 1):
        ids = windows(train, shape["length"], shape["batch"], step_seed(10_000, step))
        loss = language_loss(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            say(f"pretraining: step {step} of {shape['steps']}, loss {loss.item():.3f}")
    unfinished = _checkpoint(cache).with_suffix(".part")
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(_checkpoint(cache))
