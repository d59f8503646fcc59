"""A training loop on a simulated machine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.device import CpuDevice, Device
from zenflow.backends.device_kernel import device_kernel
from zenflow.backends.host_kernel import choose_kernel
from zenflow.backends.link import Link, SharedLink
from zenflow.backends.reduce import LocalReduce
from zenflow.config import ZenFlowConfig
from zenflow.optimizer import ZenFlowAdamW
from zenflow.runtime.platform import Platform
from zenflow.runtime.stats import StepStats
from zenflow.testing.simulated.clock import Simulation
from zenflow.testing.simulated.device import SimulatedDevice, SimulatedLink
from zenflow.testing.simulated.host import PoisonedStorage, SimulatedKernel, SimulatedWorkers
from zenflow.testing.simulated.memory import DeviceMemory
from zenflow.testing.simulated.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How fast the simulated machine is. Whatever is not named takes no time."""

    forward_s: float = 0.0
    """Seconds of one forward pass."""
    backward_s: float = 0.0
    """Seconds of one backward pass."""
    to_host_bytes_per_s: float = inf
    to_device_bytes_per_s: float = inf
    sweep_s_per_element: float = 0.0
    """Host seconds for each element of a sweep, however many slots it applies."""
    slot_s_per_element: float = 0.0
    """Host seconds for each element and each slot beside that."""


class SimulatedMachine:
    """The parts of one machine; :meth:`platform` is what the runtime sees of it.

    Args:
        policy: when queued work takes effect.
        rates: how long it takes.
        shared: the CPU is the device: compute runs in the training thread, nothing is copied, and only
            the workers' work is queued.
        num_workers: host workers.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        rates: Rates | None = None,
        *,
        shared: bool = False,
        num_workers: int = 1,
    ) -> None:
        self.rates = rates or Rates()
        self.shared = shared
        self.simulation = Simulation(policy)
        self.memory = DeviceMemory()
        self.kernel = SimulatedKernel(
            self.simulation, self.rates.sweep_s_per_element, self.rates.slot_s_per_element
        )
        self.workers = SimulatedWorkers(
            self.simulation, num_workers, self.simulation.policy.workers
        )

    def platform(self) -> Platform:
        simulation, rates = self.simulation, self.rates
        device: Device = CpuDevice()
        link: Link = SharedLink()
        if not self.shared:
            device = SimulatedDevice(simulation, self.memory)
            link = SimulatedLink(
                simulation, self.memory, rates.to_host_bytes_per_s, rates.to_device_bytes_per_s
            )
        return Platform(
            device=device,
            link=link,
            kernel=self.kernel,
            device_kernel=device_kernel(choose_kernel(), shares_memory=self.shared),
            storage=PoisonedStorage(),
            reduce=LocalReduce(),
            workers=self.workers,
            clock=simulation.clock,
        )


class SimulatedZenFlowAdamW(ZenFlowAdamW):
    """The optimizer under test: everything but the platform is the real one."""

    def __init__(self, machine: SimulatedMachine, params: Iterable[Any], **arguments: Any) -> None:
        self._machine = machine
        super().__init__(params, **arguments)

    def abandon(self) -> None:
        """Leave without closing: a run that went wrong has nothing to save."""
        self._session.abandon()

    def _make_platform(self, device: torch.device) -> Platform:
        return self._machine.platform()


class SimulatedTraining:
    """Forward, backward and ``step()``, with gradients given instead of computed.

    The forward pass reads every weight as work of the device; what it read is kept. So a weight that
    is written too late, too early or with something else shows in :attr:`seen`.

    Attributes:
        seen: for each forward pass that has taken effect, every parameter's value.
        stats: of each step.
        periods_s: virtual seconds from the end of one step to the end of the next.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        groups: Sequence[dict[str, Any]],
        config: ZenFlowConfig,
    ) -> None:
        self.machine = machine
        self.optimizer = SimulatedZenFlowAdamW(machine, groups, config=config)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.seen: list[list[Tensor]] = []
        self.stats: list[StepStats] = []
        self.periods_s: list[float] = []

    def step(self, grads: Sequence[Tensor | None]) -> StepStats:
        """One training step. ``grads[i]`` is the gradient of parameter ``i``, None if it has
        none."""
        begin_s = self.machine.simulation.main.now_s
        self.forward()
        self.backward(grads)
        self.optimizer.step()
        self.stats.append(self.optimizer.stats)
        self.periods_s.append(self.machine.simulation.main.now_s - begin_s)
        return self.optimizer.stats

    def forward(self) -> None:
        """Read every weight."""
        self._compute(self.machine.rates.forward_s, self._see)

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Give every parameter its gradient, in memory of its own; the last parameter's comes
        first."""
        given = [(p, g) for p, g in zip(self.params, grads, strict=True) if g is not None]
        for param, grad in reversed(given):
            self._compute(self.machine.rates.backward_s / len(given), self._filling(param, grad))
            for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                hook(param)

    def edit(self, index: int, factor: float, *, counted: bool = True) -> None:
        """The user scales a parameter in place between two steps.

        Args:
            counted: in a way that changes the version; False: through ``.data``.
        """
        param = self.params[index]
        if counted:
            torch.autograd.graph.increment_version(param)
        self._compute(0.0, lambda: param.data.mul_(factor))

    def weights(self) -> list[Tensor]:
        """Every parameter's value once all device work so far has taken effect."""
        self.forward()
        if not self.machine.shared:
            self.machine.simulation.compute.mark().wait()
        return self.seen.pop()

    def _see(self) -> None:
        self.seen.append([param.data.clone() for param in self.params])

    def _filling(self, param: Tensor, grad: Tensor) -> Callable[[], object]:
        """What writes ``grad`` into new memory in ``param.grad``, and holds no claim to it."""
        if self.machine.shared:
            param.grad = torch.empty_like(param)
        else:
            param.grad = self.machine.memory.empty(param.shape, param.dtype)
        raw = self.machine.memory.reference(param.grad).raw
        return lambda: raw.copy_(grad)

    def _compute(self, duration_s: float, effect: Callable[[], object]) -> None:
        if self.machine.shared:
            effect()
            self.machine.simulation.spend(duration_s)
        else:
            self.machine.simulation.compute.enqueue(effect, duration_s=duration_s)
