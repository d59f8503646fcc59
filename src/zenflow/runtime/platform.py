"""The seams of one machine, chosen once by what it can do."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zenflow.backends.device import AcceleratorDevice, CpuDevice, Device
from zenflow.backends.host_kernel import HostKernel, choose_kernel
from zenflow.backends.link import Link, SharedLink, StreamLink
from zenflow.backends.reduce import LocalReduce, Reduce
from zenflow.backends.storage import RamStorage, Storage
from zenflow.config import ZenFlowConfig
from zenflow.runtime.workers import HostWorkers, ThreadWorkers

_log = logging.getLogger("zenflow")
_MAX_AUTO_THREADS = 8


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """What the engine runs on."""

    device: Device
    link: Link
    kernel: HostKernel
    storage: Storage
    reduce: Reduce
    workers: HostWorkers
    clock: Callable[[], float] = time.perf_counter
    release: Callable[[], None] = _nothing
    """Gives back what choosing the platform took from the process; called once, at close."""


def choose_platform(device: torch.device, config: ZenFlowConfig) -> Platform:
    """The platform for weights on ``device``. Starts the worker threads."""
    shares_memory = device.type == "cpu"
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    num_threads = host_threads(config, cores, shares_memory=shares_memory)
    competes = shares_memory and config.overlap_step
    return Platform(
        device=CpuDevice() if shares_memory else AcceleratorDevice(device),
        link=SharedLink() if shares_memory else StreamLink(device),
        kernel=choose_kernel(),
        storage=RamStorage(pin=not shares_memory),
        reduce=LocalReduce(),
        # Without it, threads of a second GPU's rank make a context on the first one.
        workers=ThreadWorkers(
            num_threads,
            None if shares_memory else partial(torch.accelerator.set_device_index, device),
        ),
        release=_compute_threads.leave_cores(cores, num_threads) if competes else _nothing,
    )


def host_threads(config: ZenFlowConfig, cores: int, *, shares_memory: bool) -> int:
    """Worker threads: the user's number, or by what else the allowed cores have to do.

    Synchronous, the training thread waits, so all cores sweep. Overlapped on a CPU as the device,
    compute needs most of them; beside an accelerator, half are left to data loading and the
    training thread.
    """
    if config.host_threads != "auto":
        return config.host_threads
    if not config.overlap_step:
        share = cores
    else:
        share = cores // 4 if shares_memory else cores // 2
    return max(1, min(share, _MAX_AUTO_THREADS))


class _ComputeThreads:
    """torch's compute threads while workers need cores: taken once, given back by the last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def leave_cores(self, cores: int, num_threads: int) -> Callable[[], None]:
        """Take the workers' cores from the compute threads: an oversubscribed pool collapses."""
        with self._lock:
            if self._users == 0:
                self._before = torch.get_num_threads()
            self._users += 1
            compute_threads = max(1, cores - num_threads)
            if compute_threads < torch.get_num_threads():
                torch.set_num_threads(compute_threads)
                _log.info(
                    "the CPU is the device: of %d cores, %d compute (torch.set_num_threads), %d sweep",
                    cores,
                    compute_threads,
                    num_threads,
                )
        return self._give_back

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and torch.get_num_threads() < self._before:
                torch.set_num_threads(self._before)


_compute_threads = _ComputeThreads()
