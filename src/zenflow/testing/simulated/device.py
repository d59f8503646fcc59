"""A device whose work is queued, and the link to it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.ticket import Ticket, Transfer
from zenflow.testing.simulated.clock import Lane, Operation, Simulation
from zenflow.testing.simulated.memory import DeviceMemory, poison_


class SimulatedDevice:
    """A stream: what runs on it is queued with the raw memory of its arguments.

    A function reads and writes that memory when the policy says so; it may run long after the caller
    has dropped the tensors, and still before whatever is queued behind it.
    """

    def __init__(self, simulation: Simulation, memory: DeviceMemory) -> None:
        self._compute = simulation.compute
        self._memory = memory

    def run(self, function: Callable[..., None], *args: Any) -> None:
        raw = self._memory.raw(args)
        self._compute.enqueue(lambda: function(*raw))

    def mark(self) -> Ticket:
        return self._compute.mark()

    def read(self, tensor: Tensor) -> Tensor:
        self._compute.mark().wait()
        return tensor.clone()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._memory.empty(shape, dtype)


class SimulatedLink:
    """Two lanes of copies.

    From the moment that its ``after`` is done a copy may have written any part of its target, so
    unless it is early, the target is poison until the copy takes effect. A copy whose device source
    was dropped before copies poison.

    Args:
        to_host_bytes_per_s, to_device_bytes_per_s: rates of the two directions.
    """

    shared = False

    def __init__(
        self,
        simulation: Simulation,
        memory: DeviceMemory,
        to_host_bytes_per_s: float,
        to_device_bytes_per_s: float,
    ) -> None:
        self._to_host = (simulation.to_host, to_host_bytes_per_s)
        self._to_device = (simulation.to_device, to_device_bytes_per_s)
        self._memory = memory

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(*self._to_host, source, target, after)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(*self._to_device, source, target, after)

    def _copy(
        self, lane: Lane, rate: float, source: Tensor, target: Tensor | None, after: Ticket
    ) -> Transfer:
        assert target is not None, "a link between two memories needs a target"
        assert (source.shape, source.dtype) == (target.shape, target.dtype)
        read, written = self._memory.reference(source), self._memory.reference(target).raw

        def effect() -> None:
            if read.alive:
                written.copy_(read.raw)
            else:
                poison_(written)

        num_bytes = source.numel() * source.element_size()
        lane.num_bytes += num_bytes
        operation = lane.enqueue(effect, duration_s=num_bytes / rate, after=after)
        if not operation.effective:
            operation.when_started(lambda: poison_(written))
        return SimulatedTransfer(target, source, operation)


class SimulatedTransfer(Transfer):
    """A copy in a lane."""

    def let_go(self) -> None:
        assert isinstance(self.ticket, Operation)
        self.ticket.when_effective([self.source, self.tensor].clear)
