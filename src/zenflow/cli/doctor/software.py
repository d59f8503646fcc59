"""What zenflow and torch would use here, and why."""

import os
import shlex
import shutil
from dataclasses import dataclass

import torch

import zenflow
from zenflow.backends.host_kernel import KERNEL_VARIABLE, NativeKernel, TorchKernel, kernel_choice
from zenflow.config import ZenFlowConfig
from zenflow.kernels.native import build
from zenflow.runtime.platform import host_threads

TORCH_FLOOR = (2, 11)
"""As pyproject.toml states it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Versions, the kernel and threads."""

    zenflow: str
    torch: str
    devices: list[str]
    """The CPU, or accelerators by number and name."""
    shares_memory: bool
    """No accelerator: the CPU is the device."""
    kernel: str | None
    """Name of the host kernel in use; None if ``ZENFLOW_KERNEL`` is wrong."""
    kernel_reason: str
    kernel_is_native: bool
    kernel_forced: str | None
    """``ZENFLOW_KERNEL``."""
    compiler: str | None
    """What would build the native kernel."""
    torch_threads: int
    omp_num_threads: str | None
    overlap_threads: int
    """Host workers that ``host_threads="auto"`` starts with ``overlap_step``."""
    synchronous_threads: int


def read_software(cores: int) -> Software:
    """Ask torch and our own selection."""
    has_accelerator = torch.accelerator.is_available()
    name: str | None = None
    native = False
    try:
        kernel, reason = kernel_choice()
        name, native = kernel.name, isinstance(kernel, NativeKernel)
        assert native or isinstance(kernel, TorchKernel)
    except ValueError as error:
        reason = str(error)
    return Software(
        zenflow=zenflow.__version__,
        torch=torch.__version__,
        devices=_devices() if has_accelerator else ["cpu"],
        shares_memory=not has_accelerator,
        kernel=name,
        kernel_reason=reason,
        kernel_is_native=native,
        kernel_forced=os.environ.get(KERNEL_VARIABLE) or None,
        compiler=find_compiler(),
        torch_threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        overlap_threads=host_threads(ZenFlowConfig(), cores, shares_memory=not has_accelerator),
        synchronous_threads=host_threads(
            ZenFlowConfig(overlap_step=False), cores, shares_memory=not has_accelerator
        ),
    )


def _devices() -> list[str]:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    names = []
    for i in range(torch.accelerator.device_count()):
        name = module.get_device_name(i) if hasattr(module, "get_device_name") else ""
        names.append(f"{kind.type}:{i} {name}".strip())
    return names


def find_compiler() -> str | None:
    """The C++ compiler that the build would use, if it can be started."""
    command = build.find_compiler()
    return shlex.join(command) if command and shutil.which(command[0]) else None
