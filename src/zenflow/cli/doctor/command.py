"""The subcommand: look, measure for a few seconds, say what was found."""

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from zenflow.backends.host_kernel import kernel_choice
from zenflow.cli.bench.report import thread_counts
from zenflow.cli.doctor.checks import BYTES_PER_PARAMETER, Problem, problems
from zenflow.cli.doctor.machine import Machine, read_machine
from zenflow.cli.doctor.measure import Speed, measure_host, measure_link
from zenflow.cli.doctor.software import Software, read_software

NAME = "doctor"
SUMMARY = "say what this machine offers, what is in use, and what would help"
DESCRIPTION = """\
Report versions, devices, the host kernel in use and why not a better one, cores and limits, and the
bandwidth that memory and a sweep reach. Each problem comes with a remedy. Takes a few seconds; the
exit code is 0, problems or not.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zenflow doctor`` to a parser."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine; the exit code is 0."""
    machine = read_machine()
    software = read_software(machine.worker_cores)
    speeds, refused = _measure(machine, software)
    found = problems(machine, software, speeds, refused)
    if arguments.json:
        print(json.dumps(_content(machine, software, speeds, found), indent=1))
    else:
        print("\n".join(_text(machine, software, speeds, refused, found)))
    return 0


def verdict(found: list[Problem]) -> str:
    """One line."""
    if not found:
        return "no problem found"
    return f"{len(found)} problem{'s' if len(found) > 1 else ''} found; each has its remedy below"


def _measure(machine: Machine, software: Software) -> tuple[list[Speed], str | None]:
    speeds: list[Speed] = []
    refused = None
    if software.kernel is not None:
        speeds = measure_host(kernel_choice().kernel, thread_counts(machine.allowed_cores))
    if not software.shares_memory:
        device = torch.accelerator.current_accelerator()
        assert device is not None
        link, refused = measure_link(torch.device(device.type, 0))
        speeds += link
    return speeds, refused


def _content(
    machine: Machine, software: Software, speeds: list[Speed], found: list[Problem]
) -> dict[str, Any]:
    return {
        "verdict": verdict(found),
        "problems": [problem._asdict() for problem in found],
        "machine": asdict(machine),
        "software": asdict(software),
        "speeds": [asdict(speed) for speed in speeds],
    }


def _text(
    machine: Machine,
    software: Software,
    speeds: list[Speed],
    refused: str | None,
    found: list[Problem],
) -> list[str]:
    facts = {
        **_software_facts(software),
        **_machine_facts(machine),
        **_thread_facts(software),
    }
    if not software.shares_memory:
        facts["pinned memory"] = f"refused: {refused}" if refused else "works"
    width = max(map(len, facts))
    lines = ["zenflow doctor", "", *(f"{name:<{width}}  {text}" for name, text in facts.items())]
    if speeds:
        lines += ["", "bandwidth reached (short runs, the best of a few)"]
        lines += [f"  {_speed_text(speed)}" for speed in speeds]
    lines += ["", f"verdict: {verdict(found)}"]
    for problem in found:
        lines += [f"  problem: {problem.what}", f"  remedy:  {problem.remedy}"]
    return lines


def _software_facts(software: Software) -> dict[str, str]:
    kernel = software.kernel or "none"
    facts = {
        "zenflow": software.zenflow,
        "torch": software.torch,
        "device": ", ".join(software.devices),
        "host kernel": f"{kernel}: {software.kernel_reason}",
    }
    if not software.kernel_is_native:
        facts["C++ compiler"] = software.compiler or "none found"
    return facts


def _machine_facts(machine: Machine) -> dict[str, str]:
    cores = f"{machine.allowed_cores} allowed of {machine.online_cores}"
    shared = "" if machine.threads_per_core > 1 else "no "
    cores += f", {machine.physical_cores} physical ({shared}SMT)"
    if machine.numa_nodes:
        cores += f", {machine.numa_nodes} memory node{'s' if machine.numa_nodes > 1 else ''}"
    quota = "none" if machine.cpu_quota is None else f"{machine.cpu_quota:g} cores' worth of time"
    facts = {"system": machine.system, "processor": machine.cpu, "cores": cores, "CPU quota": quota}
    if machine.available_bytes is not None:
        fitting = machine.available_bytes // BYTES_PER_PARAMETER / 1e6
        facts["host memory"] = (
            f"{machine.available_bytes / 2**30:.1f} GiB available ({machine.memory_limit}): room "
            f"for the state of {fitting:,.0f} million parameters at {BYTES_PER_PARAMETER} bytes"
        )
    return facts


def _thread_facts(software: Software) -> dict[str, str]:
    omp = "not set" if software.omp_num_threads is None else software.omp_num_threads
    share = (
        "the CPU is the device: all of its cores, in what compute leaves of them"
        if software.shares_memory
        else "half of the cores; the rest is for loading data and the training thread"
    )
    return {
        "torch threads": f"{software.torch_threads} (OMP_NUM_THREADS {omp})",
        "worker threads": f"{software.overlap_threads} overlapped ({share}; at least 1, at most 8), "
        f"{software.synchronous_threads} synchronous",
    }


def _speed_text(speed: Speed) -> str:
    threads = f"{speed.threads} thread{'s' if speed.threads > 1 else ''}"
    text = f"{speed.name:<24} {threads:>11}  {speed.gb_per_s:7.1f} GB/s"
    if speed.ns_per_parameter is not None:
        text += f"  {speed.ns_per_parameter:.3f} ns a parameter and gradient step"
    return text
