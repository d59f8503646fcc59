"""One pass over a flat model, in every way that the kernel benchmark compares."""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.backends.host_kernel import HostKernel, HostState
from zenflow.core.rules import SubStep

SEGMENT_NUMEL = 1 << 20
ADAMW = SubStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


@dataclass(frozen=True)
class Pass:
    """What is timed.

    Attributes:
        run: one pass over all elements, with so many threads.
        bytes: that have to be moved for each element.
        steps: gradient steps that a pass applies; 0 for what is no optimizer.
    """

    name: str
    run: Callable[[int], None]
    bytes: int
    steps: int


class FlatModel:
    """Flat state, slots and weights of a model of bf16 weights and gradients.

    Args:
        numel: parameters.
        num_slots: gradients that a sweep can apply at once.
    """

    def __init__(self, numel: int, num_slots: int) -> None:
        self.numel = numel
        self.state = HostState(
            torch.randn(numel), torch.randn(numel).mul_(1e-3), torch.rand(numel).mul_(1e-6)
        )
        self.slots = [torch.randn(numel).mul_(1e-2).bfloat16() for _ in range(num_slots)]
        self.weights = torch.empty(numel, dtype=torch.bfloat16)
        self.grad32 = self.slots[0].float()
        self._step = torch.tensor(10.0)
        split = [t.split(SEGMENT_NUMEL) for t in (*self.state, self.weights, *self.slots)]
        self._segments = [
            (HostState(*tensors[:3]), tensors[3], tensors[4:])
            for tensors in zip(*split, strict=True)
        ]
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def sweep(self, kernel: HostKernel, num_slots: int) -> Pass:
        """Segment by segment, as the workers do."""
        coefficients = [ADAMW._replace(step=10 + i).coefficients() for i in range(num_slots)]
        delay = (num_slots + 1) / 2

        def run(num_threads: int) -> None:
            def share(first: int) -> None:
                for state, out, slots in self._segments[first::num_threads]:
                    grads = slots[:num_slots]
                    kernel.sweep(state, grads, coefficients, mean=False, delay=delay, out=out)

            pool = self._pools.setdefault(num_threads, ThreadPoolExecutor(num_threads))
            list(pool.map(share, range(num_threads)))

        bytes_moved = 24 + 2 + 2 * num_slots
        return Pass(f"sweep, {kernel.name}, S={num_slots}", run, bytes_moved, num_slots)

    def copy(self) -> Pass:
        """fp32 to fp32."""
        return Pass("copy fp32", lambda _: self._copy(), 8, 0)

    def triad(self) -> Pass:
        """Two fp32 streams in, one out."""
        return Pass("triad fp32", lambda _: self._triad(), 12, 0)

    def fused(self) -> list[Pass]:
        """torch's AdamW, alone and between the two casts that bf16 needs."""
        return [
            Pass("torch AdamW fused, fp32", self._fused, 28, 1),
            Pass("torch AdamW fused, with casts", self._with_casts(self._fused), 40, 1),
        ]

    def deepspeed(self) -> list[Pass]:
        """DeepSpeed's CPU Adam in the same two ways; it has to be importable."""
        adam = importlib.import_module("deepspeed.ops.adam")
        weight = torch.nn.Parameter(self.state.master)
        weight.grad = self.grad32
        optimizer = adam.DeepSpeedCPUAdam([weight], lr=ADAMW.lr, weight_decay=ADAMW.weight_decay)

        def run(_: int) -> None:
            optimizer.step()

        return [
            Pass("DeepSpeedCPUAdam, fp32", run, 28, 1),
            Pass("DeepSpeedCPUAdam, with casts", self._with_casts(run), 40, 1),
        ]

    def close(self) -> None:
        """End the sweeping threads."""
        for pool in self._pools.values():
            pool.shutdown()

    def _copy(self) -> None:
        self.state.exp_avg.copy_(self.state.master)

    def _triad(self) -> None:
        torch.add(self.state.master, self.grad32, alpha=0.5, out=self.state.exp_avg)

    def _fused(self, _: int) -> None:
        p, m, v = ([tensor] for tensor in self.state)
        settings: dict[str, Any] = {
            "lr": ADAMW.lr,
            "beta1": ADAMW.beta1,
            "beta2": ADAMW.beta2,
            "weight_decay": ADAMW.weight_decay,
            "eps": ADAMW.eps,
        }
        torch._fused_adamw_(
            p, [self.grad32], m, v, [], [self._step], amsgrad=False, maximize=False, **settings
        )

    def _with_casts(self, update: Callable[[int], None]) -> Callable[[int], None]:
        def run(num_threads: int) -> None:
            self.grad32.copy_(self.slots[0])
            update(num_threads)
            self.weights.copy_(self.state.master)

        return run
