"""What is wrong, each with its remedy: a pure function of what was found."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from zenflow.backends.host_kernel import KERNEL_VARIABLE
from zenflow.cli.doctor.machine import Machine
from zenflow.cli.doctor.measure import Speed
from zenflow.cli.doctor.software import TORCH_FLOOR, Software
from zenflow.kernels.native import build

BYTES_PER_PARAMETER = 20
"""Host memory that an update interval of 4 takes at most."""
_SMALL_MODEL = 50_000_000
_SLOW_SWEEP = 0.5
"""Share of the copy's bandwidth under which a native sweep with one slot is slow."""


class Problem(NamedTuple):
    """What is wrong, and what helps."""

    what: str
    remedy: str


def problems(
    machine: Machine, software: Software, speeds: list[Speed], pinning_refused: str | None
) -> list[Problem]:
    """Everything that costs speed or will fail here, the worst first."""
    return [
        *_versions(software),
        *_kernel(software),
        *_cores(machine),
        *_torch_threads(machine, software),
        *_memory(machine),
        *_pinning(pinning_refused),
        *_bandwidth(software, speeds),
    ]


def _versions(software: Software) -> Iterator[Problem]:
    numbers = tuple(int(n) for n in re.findall(r"\d+", software.torch)[:2])
    if numbers < TORCH_FLOOR:
        wanted = ".".join(map(str, TORCH_FLOOR))
        yield Problem(f"torch {software.torch} is too old", f"install torch {wanted} or later")


def _kernel(software: Software) -> Iterator[Problem]:
    if software.kernel is None:
        yield Problem(
            f"no optimizer can be made: {software.kernel_reason}",
            f"unset {KERNEL_VARIABLE}, or set it to one that is possible here",
        )
    elif software.kernel_forced:
        yield Problem(
            f"the host kernel is {software.kernel}, whatever is fastest, because "
            f"{KERNEL_VARIABLE} forces it",
            f"unset {KERNEL_VARIABLE}",
        )
    elif not software.kernel_is_native and software.compiler is None:
        yield Problem(
            "the host kernel is plain torch, several times slower than the native one, and there "
            "is no C++ compiler to build that with",
            "install one (Debian: apt install g++) or set CXX, then install zenflow again",
        )
    elif not software.kernel_is_native:
        yield Problem(
            f"the host kernel is plain torch, several times slower than the native one: "
            f"{software.kernel_reason}",
            f"install zenflow again, or run `python {build.__file__}` (with {software.compiler})",
        )


def _cores(machine: Machine) -> Iterator[Problem]:
    if machine.cpu_quota is not None and machine.cpu_quota < machine.allowed_cores:
        yield Problem(
            f"a control group allows {machine.cpu_quota:g} cores' worth of time on "
            f"{machine.allowed_cores} cores: threads beyond it are stopped in mid-step",
            "raise the quota (docker --cpus), or set host_threads and OMP_NUM_THREADS to fit in it",
        )
    if machine.allowed_cores == 1:
        yield Problem(
            "one core is allowed: sweeps and the training thread take turns on it",
            "allow two or more (taskset, the container's or the job's cores)",
        )
    if machine.numa_nodes is not None and machine.numa_nodes > 1:
        yield Problem(
            f"the allowed cores belong to {machine.numa_nodes} memory nodes: a sweep may read the "
            "other node's memory",
            "bind the process to one node, the accelerator's (numactl --cpunodebind --membind)",
        )


def _torch_threads(machine: Machine, software: Software) -> Iterator[Problem]:
    if software.torch_threads > machine.usable_cores:
        yield Problem(
            f"torch computes with {software.torch_threads} threads on {machine.usable_cores:g} "
            "cores: an oversubscribed pool collapses",
            f"set OMP_NUM_THREADS={max(1, int(machine.usable_cores))}",
        )
    elif software.shares_memory and software.torch_threads == 1 and machine.usable_cores >= 3:
        yield Problem(
            f"torch computes with one thread, and {machine.usable_cores:g} cores are allowed",
            "set OMP_NUM_THREADS (torchrun sets it to 1)",
        )


def _memory(machine: Machine) -> Iterator[Problem]:
    available = machine.available_bytes
    if available is not None and available < _SMALL_MODEL * BYTES_PER_PARAMETER:
        yield Problem(
            f"{available / 2**30:.1f} GiB of host memory are left ({machine.memory_limit}): not "
            f"even {_SMALL_MODEL // 10**6} million parameters fit at {BYTES_PER_PARAMETER} bytes",
            "end other programs, or raise the control group's memory limit",
        )


def _pinning(refused: str | None) -> Iterator[Problem]:
    if refused:
        yield Problem(
            f"host memory cannot be pinned ({refused}): copies are slower and do not overlap",
            "raise the limit of locked memory (ulimit -l unlimited, docker --ulimit memlock=-1)",
        )


def _bandwidth(software: Software, speeds: list[Speed]) -> Iterator[Problem]:
    if not software.kernel_is_native or not speeds:
        return
    most = max(speed.threads for speed in speeds)
    rates = {speed.name: speed.gb_per_s for speed in speeds if speed.threads == most}
    copy = rates.get("copy fp32")
    sweep = next((rate for name, rate in rates.items() if name.endswith("S=1")), None)
    if copy and sweep and sweep < _SLOW_SWEEP * copy:
        yield Problem(
            f"a sweep moves {sweep:.1f} GB/s where a copy moves {copy:.1f}",
            "see what else the machine is doing (top), and run zenflow doctor again",
        )
