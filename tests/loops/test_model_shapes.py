"""Parameters of every shape, layout and dtype, in real forward and backward passes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from twins import OVERLAPPED, SYNCHRONOUS, TWINS, check_shadow, check_streamed, check_twin, seeded

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 1e-2
NUM_STEPS = 10
CONFIGS = {"synchronous": SYNCHRONOUS, "overlapped": OVERLAPPED}


class Fed(nn.Module):
    """A model with the input that it takes."""

    def __init__(self, body: nn.Module, *shape: int, channels_last: bool = False) -> None:
        super().__init__()
        self.body, self.shape = body, shape
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def loss(self, step: int) -> Tensor:
        x = seeded(*self.shape, seed=step).contiguous(memory_format=self.layout)
        return self.body(x).float().square().mean()


class Experts(nn.Module):
    """Fused experts: one 3-D weight for all, each token through one; some get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded(4, 20, 28, seed=1) / 5)
        self.down = nn.Parameter(seeded(4, 28, 20, seed=2) / 5)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 3
        hidden = torch.bmm(x.unsqueeze(1), self.up[chosen]).relu()
        return torch.bmm(hidden, self.down[chosen]) + x.unsqueeze(1)


class Odd(nn.Module):
    """A scalar, an empty weight, vectors, a weight of one channel and a tiny one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 20))
        self.none = nn.Parameter(torch.zeros(0))
        self.bias = nn.Parameter(torch.zeros(20))
        self.column = nn.Parameter(seeded(90, 1, seed=1))
        self.row = nn.Parameter(seeded(1, 90, seed=2))
        self.tiny = nn.Parameter(seeded(3, 5, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        outer = (self.column @ self.row)[:20, :20]
        total = self.empty.sum() + self.none.sum() + self.tiny.sum()
        return (x @ outer) * self.scale + self.bias + total


class Views(nn.Module):
    """Weights whose memory is not in the order of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(seeded(30, 20, seed=1).t())
        self.sliced = nn.Parameter(seeded(30, 50, seed=2)[:, ::2])
        self.permuted = nn.Parameter(seeded(5, 4, 25, seed=3).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed @ self.sliced / 10) @ self.permuted.flatten(1)


class Tokens(nn.Module):
    """An embedding with a padding row, which has a gradient of zeros, tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24, padding_idx=3)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 20).long() % 40
        logits = self.head(self.embedding(tokens).mean(1))
        return nn.functional.cross_entropy(logits, tokens[:, 0], reduction="none")


class Recurrent(nn.Module):
    """An LSTM, whose weights lie in one flat buffer on some devices, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.attention(hidden, hidden, hidden)[0]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(7, 7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x)


def convolutions(*, channels_last: bool = False) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, groups=3),
        nn.ConvTranspose2d(12, 7, 2),
        nn.Conv2d(7, 9, 1),
    )
    if channels_last:
        body = body.to(memory_format=torch.channels_last)
    return Fed(body, 2, 3, 9, 9, channels_last=channels_last)


def weight_norm() -> nn.Module:
    return Fed(
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(20, 30)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(30, 20), dim=1),
        ),
        *(8, 20),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: Fed(nn.Sequential(nn.Conv1d(5, 9, 3), nn.Conv1d(9, 4, 2)), 2, 5, 16),
    "conv2d": convolutions,
    "conv2d channels_last": lambda: convolutions(channels_last=True),
    "conv3d": lambda: Fed(nn.Sequential(nn.Conv3d(3, 6, 2), nn.Conv3d(6, 5, 2)), 2, 3, 5, 5, 5),
    "experts": lambda: Fed(Experts(), 8, 20),
    "odd shapes": lambda: Fed(Odd(), 8, 20),
    "non-contiguous": lambda: Fed(Views(), 8, 20),
    "tied padded embedding": lambda: Fed(Tokens(), 8, 5),
    "recurrent and attention": lambda: Fed(Recurrent(), 4, 6, 12),
    "weight_norm": weight_norm,
    "orthogonal": lambda: Fed(parametrizations.orthogonal(nn.Linear(12, 12)), 8, 12),
    "bilinear": lambda: Fed(Pairs(), 6, 7),
}


def made(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]()

    return make


def train(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = model.loss(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.covers("shapes", "tied weights")
@pytest.mark.parametrize("config", TWINS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_as_with_adamw(model: str, config: str) -> None:
    check_twin(made(model), train, TWINS[config], lr=LR)


@pytest.mark.covers("shapes", "tied weights")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_each_gradient_is_applied_once(model: str, config: str) -> None:
    check_shadow(made(model), train, CONFIGS[config], lr=LR)


@pytest.mark.covers("streaming capture")
@pytest.mark.parametrize("model", MODELS)
def test_streamed_gradients_have_the_same_bits(model: str) -> None:
    check_streamed(made(model), train, lr=LR)


def mixed(dtype: torch.dtype) -> Callable[[], nn.Module]:
    """16-bit matrices beside fp32 norms, as many models are loaded."""

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).float()

    def make() -> nn.Module:
        torch.manual_seed(0)
        body = nn.Sequential(
            Casting(20, 30, dtype=dtype), nn.LayerNorm(30), nn.Tanh(), Casting(30, 20, dtype=dtype)
        )
        return Fed(body, 8, 20)

    return make


@pytest.mark.covers("16-bit state", "shapes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
def test_16_bit_weights_beside_fp32(config: str, dtype: torch.dtype) -> None:
    """The shadow's fp32 weights are the masters."""
    check_shadow(mixed(dtype), train, CONFIGS[config], lr=LR)
    check_streamed(mixed(dtype), train, lr=LR)


@pytest.mark.covers("shapes")
@pytest.mark.parametrize("model", ["conv2d channels_last", "non-contiguous"])
def test_a_layout_stays(model: str) -> None:
    strides = []

    def loop(each: nn.Module, optimizer: Optimizer) -> None:
        strides.append([param.stride() for param in each.parameters()])
        train(each, optimizer)
        strides.append([param.stride() for param in each.parameters()])

    check_shadow(made(model), loop, lr=LR)
    assert strides[0] == strides[1]


@pytest.mark.covers("shapes", "weights written by the user")
def test_a_layout_may_change_while_training() -> None:
    """``model.to(memory_format=...)`` gives the parameters other memory of equal values."""

    def loop(each: nn.Module, optimizer: Optimizer) -> None:
        train(each, optimizer)
        getattr(optimizer, "synchronize", int)()
        each.to(memory_format=torch.channels_last)
        train(each, optimizer)

    for config in TWINS.values():
        check_twin(made("conv2d"), loop, config, lr=LR)
    check_shadow(made("conv2d"), loop, lr=LR)


@pytest.mark.covers("decoupled decay")
def test_a_padding_row_moves_only_by_decay() -> None:
    def make() -> nn.Module:
        model = made("tied padded embedding")()
        model.body.head.weight = nn.Parameter(seeded(40, 24, seed=1))
        nn.init.ones_(model.body.embedding.weight)
        return model

    def loop(each: nn.Module, optimizer: Optimizer) -> None:
        train(each, optimizer)
        getattr(optimizer, "synchronize", int)()
        row = each.body.embedding.weight[3].detach()
        torch.testing.assert_close(row, torch.full((24,), (1 - LR * 0.5) ** NUM_STEPS))

    check_twin(make, loop, SYNCHRONOUS, lr=LR, weight_decay=0.5)
    check_shadow(make, loop, lr=LR, weight_decay=0.5)
