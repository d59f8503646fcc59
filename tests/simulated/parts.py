"""A small machine for tests of the simulator itself."""

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.testing.simulated import Effects, Policy, Simulation
from zenflow.testing.simulated.device import SimulatedDevice, SimulatedLink
from zenflow.testing.simulated.host import SimulatedWorkers
from zenflow.testing.simulated.memory import DeviceMemory

SIZE = (2, 3)
NUM_BYTES = 24


class Machine:
    """A device and a link of 24 and 12 bytes a second: one tensor takes 1 and 2 seconds."""

    def __init__(self, compute: Effects = "late", links: Effects = "late", num_workers: int = 1):
        self.simulation = Simulation(Policy(compute=compute, links=links, workers="late"))
        self.memory = DeviceMemory()
        self.device = SimulatedDevice(self.simulation, self.memory)
        self.link = SimulatedLink(self.simulation, self.memory, NUM_BYTES, NUM_BYTES / 2)
        self.workers = SimulatedWorkers(self.simulation, num_workers, "late")

    def tensor(self, value: float | None = None) -> Tensor:
        tensor = self.device.empty(SIZE, torch.float32)
        if value is not None:
            self.device.run(Tensor.fill_, tensor, value)
        return tensor

    def to_host(self, source: Tensor) -> Transfer:
        return self.link.to_host(source, torch.zeros(SIZE), self.device.mark())


def is_poison(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


def is_all(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())
