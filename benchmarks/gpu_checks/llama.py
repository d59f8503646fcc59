"""A Llama-shaped model in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Dimensions of a model and of a batch."""

    hidden: int
    inner: int
    heads: int
    layers: int
    vocabulary: int
    batch: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length

    @property
    def num_parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + (2 * self.vocabulary + 1) * self.hidden


class Llama(nn.Module):
    """Embedding, pre-norm layers of attention and gated MLP, output projection.

    Position is left out: it changes neither shapes nor cost by much.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.output = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """The mean loss of predicting each next token."""
        x_BLH = self.embedding(tokens_BL)
        for layer in self.layers:
            x_BLH = layer(x_BLH)
        logits = self.output(self.norm(x_BLH[:, :-1])).flatten(0, 1)
        return functional.cross_entropy(logits, tokens_BL[:, 1:].flatten())


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.query, self.key, self.value, self.merge = (
            nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size.hidden, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x_BLH: Tensor) -> Tensor:
        normed = self.norm1(x_BLH)
        q, k, v = (
            f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLH = x_BLH + self.merge(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x_BLH)
        return x_BLH + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def make(size: Size, device: torch.device) -> Llama:
    """In bf16, with the same weights each time."""
    torch.manual_seed(0)
    with device:
        model = Llama(size).to(torch.bfloat16)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    return model
