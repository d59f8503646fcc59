"""What the operating system says of the machine and of this process's share of it."""

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zenflow.cli.bench.report import cpu_name, system_name
from zenflow.runtime.memory import available_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores and memory; None where the system does not say."""

    system: str
    cpu: str
    online_cores: int
    allowed_cores: int
    """Cores in this process's affinity mask."""
    physical_cores: int | None
    """Physical cores that the allowed ones belong to."""
    numa_nodes: int | None
    """Memory nodes that the allowed cores belong to."""
    cpu_quota: float | None
    """Cores' worth of time that the tightest control group allows; None: no quota."""
    available_bytes: int | None
    """Host memory that can still be taken."""
    memory_limit: str | None
    """What limits it."""

    @property
    def threads_per_core(self) -> float | None:
        """More than 1 where allowed cores share a physical one (SMT)."""
        return self.allowed_cores / self.physical_cores if self.physical_cores else None

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
    online = os.cpu_count() or 1
    if allowed is None:
        has_mask = hasattr(os, "sched_getaffinity")
        allowed = set(os.sched_getaffinity(0)) if has_mask else set(range(online))
    memory = available_memory(root)
    return Machine(
        system=f"{system_name()}, Python {platform.python_version()}",
        cpu=cpu_name(root),
        online_cores=max(online, len(allowed)),
        allowed_cores=len(allowed),
        physical_cores=_physical_cores(root / "sys/devices/system/cpu", allowed),
        numa_nodes=_numa_nodes(root / "sys/devices/system/node", allowed),
        cpu_quota=min(_quotas(root), default=None),
        available_bytes=memory.num_bytes if memory else None,
        memory_limit=memory.limit if memory else None,
    )


def _physical_cores(folder: Path, allowed: set[int]) -> int | None:
    found = set()
    for core in allowed:
        topology = folder / f"cpu{core}" / "topology"
        try:
            names = ("physical_package_id", "core_id")
            found.add(tuple(int((topology / name).read_text()) for name in names))
        except (OSError, ValueError):
            return None
    return len(found) or None


def _numa_nodes(folder: Path, allowed: set[int]) -> int | None:
    nodes = 0
    for cores in folder.glob("node[0-9]*/cpulist"):
        nodes += not allowed.isdisjoint(_cores_of(cores.read_text()))
    return nodes or None


def _cores_of(text: str) -> set[int]:
    """``0-2,5`` as numbers."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {core for low, high in ranges for core in range(int(low), int(high or low) + 1)}


def _quotas(root: Path) -> Iterator[float]:
    """Of every control group that this process is in, version 2 or 1, in cores."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup/cpu"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if mount in (folder, *folder.parents):
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    """``quota period`` in one file (version 2), or a file for each (version 1)."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
            quota, period = (int(word) for word in words)
        except (OSError, ValueError):  # not there, or no quota: "max"
            continue
        if quota > 0 and period > 0:
            yield quota / period
