"""What the operating system says of the machine and of this process's share of it."""

import platform
from dataclasses import dataclass
from pathlib import Path

from zenflow.cli.bench.report import cpu_name, system_name
from zenflow.runtime.cores import read_cores
from zenflow.runtime.memory import available_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores and memory; None where the system does not say."""

    system: str
    cpu: str
    online_cores: int
    allowed_cores: int
    """Cores in this process's affinity mask."""
    physical_cores: int
    """Physical cores that the allowed ones belong to; all of them, where the system does not say."""
    numa_nodes: int | None
    """Memory nodes that the allowed cores belong to."""
    cpu_quota: float | None
    """Cores' worth of time that the tightest control group allows; None: no quota."""
    worker_cores: int
    """Physical cores of this process's share, or what the quota leaves of them."""
    available_bytes: int | None
    """Host memory that can still be taken."""
    memory_limit: str | None
    """What limits it."""

    @property
    def threads_per_core(self) -> float:
        """More than 1 where allowed cores share a physical one (SMT)."""
        return self.allowed_cores / self.physical_cores

    @property
    def usable_cores(self) -> float:
        """Allowed cores, or what the quota leaves of them."""
        return min(self.allowed_cores, self.cpu_quota or self.allowed_cores)


def read_machine(root: Path = Path("/"), allowed: set[int] | None = None) -> Machine:
    """Read it from the system's files.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
        allowed: numbers of the allowed cores; None asks the system.
    """
    cores = read_cores(root, allowed)
    memory = available_memory(root)
    return Machine(
        system=f"{system_name()}, Python {platform.python_version()}",
        cpu=cpu_name(root),
        online_cores=cores.online,
        allowed_cores=len(cores.allowed),
        physical_cores=len(cores.physical),
        numa_nodes=len(set(cores.nodes.values())) or None,
        cpu_quota=cores.quota,
        worker_cores=cores.share().usable,
        available_bytes=memory.num_bytes if memory else None,
        memory_limit=memory.limit if memory else None,
    )
