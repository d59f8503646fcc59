"""Host memory: what is needed is compared with what there is before any of it is taken."""

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.budget import host_need
from zenflow.core.channels import is_split
from zenflow.core.selection import num_selected

_GIB = 1 << 30


class Available(NamedTuple):
    """Host memory that can still be taken, and what limits it."""

    num_bytes: int
    limit: str


def check_host_memory(params: Sequence[Tensor], config: ZenFlowConfig) -> None:
    """Refuse parameters whose deferred state does not fit into host memory.

    Raises:
        MemoryError: with the need, what is available, and what would help.
    """
    trained = [p for p in params if p.requires_grad and is_split(p, config.topk_ratio)]
    need = host_need([_hosted(p, config) for p in trained], config.interval_bound)
    available = available_memory()
    if available is None or need.total <= available.num_bytes:
        return
    raise MemoryError(
        f"ZenFlowAdamW needs {need.total / _GIB:.2f} GiB of host memory for the deferred state "
        f"({need.state / _GIB:.2f} master and moments, {need.slots / _GIB:.2f} slots, "
        f"{need.staging / _GIB:.2f} staging) and {available.num_bytes / _GIB:.2f} GiB are "
        f"available ({available.limit}); raise the limit, train fewer parameters, raise "
        f"topk_ratio={config.topk_ratio}, or lower the update interval ({config.interval_bound})"
    )


def available_memory(root: Path = Path("/")) -> Available | None:
    """The tightest of the machine's and each control group's free memory; None if unknown."""
    found = [*_machine(root / "proc/meminfo"), *_control_groups(root)]
    return min(found, key=lambda available: available.num_bytes, default=None)


def _hosted(param: Tensor, config: ZenFlowConfig) -> tuple[int, int]:
    channels = param.shape[1]
    if param.device.type != "cpu":
        channels -= num_selected(channels, config.topk_ratio)
    return param.numel() // param.shape[1] * channels, param.element_size()


def _machine(meminfo: Path) -> Iterator[Available]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "MemAvailable of the machine")


def _control_groups(root: Path) -> Iterator[Available]:
    """Free memory of every group that this process is in, version 2 or 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(root / "sys/fs/cgroup/memory", path, *names)


def _limits(mount: Path, path: str, limit_name: str, usage_name: str) -> Iterator[Available]:
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if mount not in (folder, *folder.parents):
            return
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / usage_name).read_text()) - _reclaimable(folder / "memory.stat")
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield Available(max(0, int(limit) - used), f"control group limit {folder}/{limit_name}")


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


class MappedFiles:
    """The files that are mapped into this process's memory, as ``torch.load(mmap=True)`` does."""

    _PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4

    def __init__(self) -> None:
        self._ranges = list(_mapped_ranges())

    def release(self, tensor: Tensor) -> None:
        """Let a tensor's pages go, if they are a file's: they come back when they are read again."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if not any(first <= start and stop <= last for first, last in self._ranges):
            return
        start, stop = (
            -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
            stop // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if start < stop:  # advice: a kernel that does not know it changes nothing
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(stop - start), self._PAGE_OUT
            )


def _mapped_ranges() -> Iterator[tuple[int, int]]:
    if sys.platform != "linux":
        return
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            start, stop = addresses.split("-")
            yield int(start, 16), int(stop, 16)
