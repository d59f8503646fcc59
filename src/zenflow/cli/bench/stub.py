"""A model behind a stub accelerator: its backward pass takes a set time and no CPU.

Each layer's gradient is ready at a set moment of the backward pass, the last layer's first, as on a
device that computes by itself. It is handed over in memory that nobody has to fill: a pool of gradients
was made before, and what an engine has dropped is handed out again. So all CPU time belongs to the
engine that is measured, and the step's time beyond compute is what that engine costs.
"""

import ctypes
import math
import time
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

_COLUMN_SPREAD = 0.7
"""Of the logarithm of the columns' gradient scale: then 5% of them hold about 40% of the energy, as
in fine-tuning."""


class GradientPool:
    """Gradients of one shape, filled once. A block is free again when its last tensor is gone."""

    def __init__(self, rows: int, columns: int) -> None:
        self._shape = rows, columns
        self._generator = torch.Generator().manual_seed(0)
        spread = torch.randn(columns, generator=self._generator) * _COLUMN_SPREAD
        self._scale_C = spread.exp() * 1e-3
        self._drawn = torch.empty(rows, columns)
        self._memory: dict[int, Tensor] = {}
        self._free: deque[int] = deque()

    def __len__(self) -> int:
        """Blocks that were ever needed at once."""
        return len(self._memory)

    def take(self) -> Tensor:
        """A gradient that is the only tensor on its memory."""
        address = self._free.popleft() if self._free else self._new_block()
        num_bytes = self._memory[address].nbytes
        block = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(block, self._free.append, address).atexit = False
        storage = torch.frombuffer(block, dtype=torch.bfloat16).untyped_storage()
        return torch.empty(0, dtype=torch.bfloat16).set_(
            storage, 0, self._shape, (self._shape[1], 1)
        )

    def fill(self, num_blocks: int) -> None:
        """Have so many blocks ready."""
        while len(self._memory) < num_blocks:
            self._free.append(self._new_block())

    def _new_block(self) -> int:
        # Always in the same memory: a temporary for each block would leave holes in the heap.
        self._drawn.normal_(generator=self._generator)
        block = self._drawn.mul_(self._scale_C).bfloat16()
        self._memory[block.data_ptr()] = block
        return block.data_ptr()


class StubModel(nn.Module):
    """bf16 matrices whose gradients the stub accelerator computes.

    Args:
        numel: parameters, rounded to whole matrices.
        side: rows and columns of a matrix.
    """

    def __init__(self, numel: int, side: int) -> None:
        super().__init__()
        num_layers = max(1, round(numel / side**2))
        generator = torch.Generator().manual_seed(1)
        drawn = torch.empty(side, side)
        self.weights = nn.ParameterList(
            nn.Parameter(drawn.normal_(0, side**-0.5, generator=generator).bfloat16())
            for _ in range(num_layers)
        )
        self.pool = GradientPool(side, side)
        self.pool.fill(num_layers)
        self.compute_s = 0.0
        self._begin_s = math.nan

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(weight.numel() for weight in self.weights)

    def forward(self, loss: Tensor) -> Tensor:
        """A loss whose backward pass ends ``compute_s`` seconds from now."""
        self._begin_s = time.perf_counter()
        for i, weight in enumerate(self.weights):
            loss = _Layer.apply(loss, weight, self, i)
        return loss

    def wait_for_layer(self, layer: int) -> None:
        """Sleep until the accelerator has computed a layer's gradient."""
        share = (len(self.weights) - layer) / len(self.weights)
        remaining_s = self._begin_s + share * self.compute_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, _weight: Tensor, model: StubModel, layer: int) -> Tensor:
        ctx.model, ctx.layer = model, layer
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.model.wait_for_layer(ctx.layer)
        return grad, ctx.model.pool.take(), None, None
