"""The cores that this process may use, and those among them that its workers are bound to."""

import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("zenflow")
_ROOT = Path("/")
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """What the operating system says of the cores.

    Attributes:
        online: how many the machine has.
        allowed: numbers of those in this process's affinity mask.
        physical: for each physical core the first of its numbers that is allowed, ascending. All of
            the allowed, where the system does not say which share one.
        nodes: the memory node of each allowed core; empty where the system does not say.
        quota: cores' worth of time that the tightest control group allows; None without a quota.
    """

    online: int
    allowed: tuple[int, ...]
    physical: tuple[int, ...]
    nodes: Mapping[int, int]
    quota: float | None

    @property
    def usable(self) -> int:
        """Physical cores, or what the quota leaves of them; at least 1."""
        return max(1, min(len(self.physical), int(self.quota or len(self.physical))))

    def share(self, environment: Mapping[str, str] = os.environ) -> "Cores":
        """This process's part, where a launcher started several on this machine and bound none.

        Args:
            environment: with ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, as torchrun sets them.
        """
        rank, size = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        bound = len(self.allowed) < self.online
        if bound or not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            return self
        num = len(self.physical)
        first, last = int(rank) * num // int(size), (int(rank) + 1) * num // int(size)
        part = self.physical[first : max(last, first + 1)]
        quota = None if self.quota is None else self.quota / int(size)
        return Cores(online=self.online, allowed=part, physical=part, nodes=self.nodes, quota=quota)


def read_cores(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Cores:
    """Read them from the system's files.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
        allowed: numbers of the allowed cores; None asks the system.
    """
    online = os.cpu_count() or 1
    if allowed is None:
        has_mask = hasattr(os, "sched_getaffinity")
        allowed = os.sched_getaffinity(0) if has_mask else range(online)
    numbers = tuple(sorted(allowed))
    return Cores(
        online=max(online, len(numbers)),
        allowed=numbers,
        physical=_physical(root / "sys/devices/system/cpu", numbers),
        nodes=_nodes(root / "sys/devices/system/node", numbers),
        quota=min(_quotas(root), default=None),
    )


def _physical(folder: Path, allowed: Sequence[int]) -> tuple[int, ...]:
    first: dict[tuple[str, ...], int] = {}
    for core in allowed:
        topology = folder / f"cpu{core}" / "topology"
        try:
            names = ("physical_package_id", "core_id")
            first.setdefault(tuple((topology / name).read_text().strip() for name in names), core)
        except OSError:
            return tuple(allowed)
    return tuple(first.values())


def _nodes(folder: Path, allowed: Sequence[int]) -> dict[int, int]:
    nodes = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        cores = _numbers(path.read_text())
        nodes.update(dict.fromkeys(cores.intersection(allowed), int(path.parent.name[4:])))
    return nodes


def _numbers(text: str) -> set[int]:
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


class WorkerCores:
    """Which cores the workers of this process are bound to, over all its optimizers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()

    def take(self, cores: Cores, num: int, node: int | None = None) -> tuple[int, ...]:
        """As many physical cores as there are workers, those with the fewest of our workers first.

        The first core is left to the training thread. None are taken where there are too few to leave
        it one: then the system places the workers.

        Args:
            cores: this process's share.
            num: of worker threads.
            node: the memory node that the device is near to, if that is known; its cores come first.
        """
        free = cores.physical[1:]
        if num > len(free):
            return ()
        with self._lock:
            near = {core for core in free if node is None or cores.nodes.get(core) == node}
            ranked = sorted(free, key=lambda core: (self._users[core], core not in near, -core))
            taken = tuple(sorted(ranked[:num]))
            self._users.update(taken)
        return taken

    def give_back(self, taken: Iterable[int]) -> None:
        """The workers on them have ended."""
        with self._lock:
            self._users.subtract(taken)


def bind_thread(cores: Sequence[int]) -> None:
    """Let the calling thread run on these cores only, if the system allows it."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _log.debug("workers are not bound to cores %s: %s", cores, error)


def let_others_first() -> None:
    """Let the calling thread run where no other wants to, if the system has priorities of threads.

    Taking whole cores from compute instead would cost it more than sweeps need, and threads of equal
    priority would hold up compute's barriers.
    """
    if not sys.platform.startswith("linux"):  # elsewhere it would be the whole process's
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    except OSError as error:
        _log.debug("workers keep their priority: %s", error)


def device_node(pci_address: str, root: Path = _ROOT) -> int | None:
    """The memory node that a PCI device is attached to; None if the system does not say.

    Args:
        pci_address: ``domain:bus:device.function`` in hexadecimal, such as ``0000:3b:00.0``.
    """
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
