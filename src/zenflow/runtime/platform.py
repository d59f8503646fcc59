"""The seams of one machine, chosen once by what it can do."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zenflow.backends.device import AcceleratorDevice, CpuDevice, Device
from zenflow.backends.device_kernel import DeviceKernel, device_kernel
from zenflow.backends.host_kernel import HostKernel, choose_kernel
from zenflow.backends.link import Link, SharedLink, StreamLink
from zenflow.backends.reduce import LocalReduce, Reduce
from zenflow.backends.storage import RamStorage, Storage
from zenflow.config import ZenFlowConfig
from zenflow.runtime.cores import (
    WorkerCores,
    bind_thread,
    device_node,
    let_others_first,
    read_cores,
)
from zenflow.runtime.workers import HostWorkers, ThreadWorkers

_MAX_AUTO_THREADS = 8


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """What the engine runs on."""

    device: Device
    link: Link
    kernel: HostKernel
    device_kernel: DeviceKernel
    storage: Storage
    reduce: Reduce
    workers: HostWorkers
    clock: Callable[[], float] = time.perf_counter
    release: Callable[[], None] = _nothing
    """Gives back what choosing the platform took from the process; called once, at close."""


def choose_platform(device: torch.device, config: ZenFlowConfig) -> Platform:
    """The platform for weights on ``device``. Starts the worker threads.

    Raises:
        ValueError: if it is neither the CPU nor this process's accelerator, or one without streams.
    """
    _check_device(device)
    shares_memory = device.type == "cpu"
    kernel = choose_kernel()
    cores = read_cores().share()
    num_threads = host_threads(config, cores.usable, shares_memory=shares_memory)
    bound: Sequence[int] = ()
    if config.overlap_step and not shares_memory:
        bound = _worker_cores.take(cores, num_threads, _node_of(device))
    begin = partial(_begin_worker, bound, device, config.overlap_step)
    workers = ThreadWorkers(num_threads, begin)
    helpers = min(num_threads, cores.usable - 1)
    return Platform(
        device=CpuDevice() if shares_memory else AcceleratorDevice(device),
        link=SharedLink() if shares_memory else StreamLink(device),
        kernel=kernel,
        device_kernel=device_kernel(
            kernel,
            shares_memory=shares_memory,
            invite=partial(_invite, workers, helpers) if helpers else None,
        ),
        storage=RamStorage(pin=not shares_memory),
        reduce=LocalReduce(),
        workers=workers,
        release=partial(_worker_cores.give_back, bound),
    )


def _check_device(device: torch.device) -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = [kind for kind in ("cpu", accelerator and accelerator.type) if kind not in (None, "mps")]
    if device.type not in here:
        raise ValueError(
            f"parameters lie on {str(device)!r}; they can be trained on "
            f"{' or '.join(map(repr, here))} here: move the model there before the first backward pass"
        )


def _begin_worker(cores: Sequence[int], device: torch.device, overlapped: bool) -> None:
    bind_thread(cores)
    if device.type != "cpu":
        # Without it, threads of a second GPU's rank make a context on the first one.
        torch.accelerator.set_device_index(device)
    elif overlapped:
        let_others_first()


def _invite(workers: HostWorkers, num: int, job: Callable[[], None]) -> None:
    """Let so many workers take part in the training thread's work, once they have no sweep to do."""
    for _ in range(num):
        workers.submit([job])


def _node_of(device: torch.device) -> int | None:
    """The memory node that a CUDA device is attached to, where torch and the system say so."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, number = (part if isinstance(part, int) else -1 for part in parts)
    return device_node(f"{domain:04x}:{bus:02x}:{number:02x}.0") if domain >= 0 else None


def host_threads(config: ZenFlowConfig, cores: int, *, shares_memory: bool) -> int:
    """Worker threads: the user's number, or by what else the allowed cores have to do.

    Beside an accelerator, half of the cores are left to data loading and the training thread. Where the
    CPU is the device, all sweep: while the training thread waits, and in what compute leaves of them.
    """
    if config.host_threads != "auto":
        return config.host_threads
    share = cores // 2 if config.overlap_step and not shares_memory else cores
    return max(1, min(share, _MAX_AUTO_THREADS))


_worker_cores = WorkerCores()
