"""Gradients without a model: known values that arrive in a real backward pass, on any device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NUM_PATTERNS = 13


class _Give(torch.autograd.Function):
    """Ends in a scalar zero; its backward pass asks for the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.make(), None


def backward(params: Sequence[nn.Parameter], makes: Sequence[Callable[[], Tensor] | None]) -> None:
    """Give each parameter the gradient that its function makes, one after the other, last one
    first."""
    zeros = [_Give.apply(p, make) for p, make in zip(params, makes, strict=True) if make]
    torch.stack([zero.float() for zero in zeros]).sum().backward()


class Gradients:
    """Gradients of every step, made on the device from a few tensors, with the same bits anywhere.

    ``num_selected`` channels of each weight are eight times as large as the others, and others in
    each step: which ones are selected does not hang on the order of a sum.

    Args:
        shapes: of the parameters.
        nums_selected: of each parameter.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        nums_selected: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        random = torch.Generator().manual_seed(7)
        by_shape = {
            shape: (torch.randn(shape, generator=random) * 1e-2).to(device, dtype)
            for shape in dict.fromkeys(shapes)
        }
        self._base = [by_shape[shape] for shape in shapes]
        self._scales = [
            _scales(shape, num, i).to(device, dtype)
            for i, (shape, num) in enumerate(zip(shapes, nums_selected, strict=True))
        ]

    def make(self, index: int, step: int) -> Tensor:
        """The gradient of parameter ``index`` in a step."""
        return self._base[index] * self._scales[index][step % _NUM_PATTERNS]

    def makers(self, step: int) -> list[Callable[[], Tensor]]:
        return [lambda i=i: self.make(i, step) for i in range(len(self._base))]  # type: ignore[misc]


def _scales(shape: tuple[int, ...], num: int, index: int) -> Tensor:
    """``[patterns, C]`` for a matrix, ``[patterns, 1]`` for a vector; short binary fractions."""
    channels = shape[1] if len(shape) == 2 else 1
    scales = torch.ones(_NUM_PATTERNS, channels)
    for pattern in range(_NUM_PATTERNS):
        start = (pattern * 5 + index * 3) * max(1, num) // 2
        scales[pattern, [(start + i) % channels for i in range(num)]] = 8.0
        scales[pattern] *= (1 + pattern % 4 / 4) * (-1) ** pattern
    return scales


def weights(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    """The same values on every device."""
    random = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=random).to(device, dtype)) for s in shapes]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also tells NaN from NaN."""
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(integer), other.view(integer))


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, of two tensors anywhere."""
    return (one.detach().cpu().float() - other.detach().cpu().float()).abs().max().item()
