"""A character-level language model small enough to train a dozen times in a minute."""

import functools
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH, BATCH, STEPS, WIDTH = 32, 16, 160, 64
HELDOUT_WINDOWS = 128
SEEDS = (0, 1)


class Text(NamedTuple):
    """Characters as numbers; the last tenth is held out."""

    train: Tensor
    heldout: Tensor
    num_characters: int


@functools.cache
def text() -> Text:
    joined = "".join(topics[name] for name in sorted(topics))
    characters = sorted(set(joined))
    number = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in joined])
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], len(characters))


class SmallModel(nn.Module):
    """Two layers of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(text().num_characters, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, text().num_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.places
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def windows(ids: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - LENGTH, (count, 1), generator=generator)
    return ids[starts + torch.arange(LENGTH + 1)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def heldout_loss(make_optimizer: Callable[..., Any], lr: float, seed: int) -> float:
    """Train from random weights; the same weights and batches for every optimizer."""
    torch.manual_seed(seed)
    model = SmallModel()
    optimizer = make_optimizer(model.parameters(), lr=lr)
    for step in range(STEPS):
        loss_of(model, windows(text().train, BATCH, 1000 * seed + step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "close"):
        optimizer.close()
    with torch.no_grad():
        return loss_of(model, windows(text().heldout, HELDOUT_WINDOWS, 0)).item()


def mean_loss(make_optimizer: Callable[..., Any], lr: float) -> float:
    return sum(heldout_loss(make_optimizer, lr, seed) for seed in SEEDS) / len(SEEDS)


@functools.cache
def adamw_loss(lr: float) -> float:
    return mean_loss(torch.optim.AdamW, lr)


def gap(make_optimizer: Callable[..., Any], lr: float) -> float:
    """Held-out loss above AdamW's."""
    return mean_loss(make_optimizer, lr) - adamw_loss(lr)
