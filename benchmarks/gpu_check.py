"""What a machine with an accelerator has to show: correctness first, then races, speed, memory.

    PYTHONPATH=src python benchmarks/gpu_check.py [--output benchmarks/results/gpu_check_NAME_DATE.md]

Needs Python, torch and this source tree. Each section has a budget, under 8 minutes in all, and the
report is written after each of them. Without a GPU it says so and ends well; ``--device cpu --quick``
goes through everything with tiny sizes. The exit code is that of the checks.
"""

import argparse
import datetime
import logging
import os
import platform
import re
import sys
from pathlib import Path

import torch
from gpu_checks import correctness, memory, overlap, races
from gpu_checks.report import Report, Section, say

from zenflow.backends.host_kernel import kernel_choice
from zenflow.kernels.native import build
from zenflow.runtime.memory import available_memory

RESULTS = Path(__file__).parent / "results"


def build_kernel() -> str:
    """Build the native kernel in place if there is none that fits and a compiler is there."""
    if kernel_choice().kernel.name != "torch":
        return "found built"
    try:
        build.build()
    except (build.BuildError, OSError) as error:
        return f"not built: {str(error).splitlines()[0]}"
    return "built now"


def environment(section: Section, device: torch.device, built: str) -> None:
    """Versions and what the machine is."""
    choice = kernel_choice()
    available = available_memory()
    section.note(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    section.note(f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    section.note(f"device: {device_name(device)}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        section.note(
            f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} processors, "
            f"{torch.cuda.device_count()} visible"
        )
        section.note("link, pinned: " + ", ".join(link_rates(device)))
    section.note(f"{num_cores()} cores allowed, {torch.get_num_threads()} compute threads")
    if available is not None:
        section.note(f"host memory: {available.num_bytes / 2**30:.1f} GiB ({available.limit})")
    section.note(f"host kernel: {choice.kernel.name} ({choice.reason}; {built})")
    section.check("a host kernel", True)


def link_rates(device: torch.device) -> list[str]:
    """GB/s of one large copy in each direction."""
    on_host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    found = []
    for name, target, source in (
        ("to host", on_host, on_device),
        ("to device", on_device, on_host),
    ):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        target.copy_(source, non_blocking=True)
        events[0].record()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        events[1].record()
        torch.cuda.synchronize(device)
        found.append(f"{name} {4 * 2**28 / events[0].elapsed_time(events[1]) / 1e6:.1f} GB/s")
    return found


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def report_path(device: torch.device) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / f"gpu_check_{name}_{datetime.date.today()}.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--output", type=Path, help="the report (default: in benchmarks/results)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        say(
            "skipped: torch sees no GPU here (--device cpu --quick goes through the script without one)"
        )
        return 0
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)  # a sum's last bit depends on how many add
    logging.getLogger("zenflow").setLevel(logging.ERROR)
    built = build_kernel()
    heading = [
        "# GPU check",
        "",
        f"- Command: `python {' '.join(sys.argv)}`",
        f"- Date: {datetime.date.today()}",
        *(["- Quick: tiny sizes, so no figure here means anything"] if options.quick else []),
    ]
    report = Report(options.output or report_path(device), heading)
    quick = options.quick
    report.run("Environment", 10, lambda s: environment(s, device, built))
    report.run("AdamW", 30, lambda s: correctness.check_adamw(s, device, quick))
    report.run("Oracle", 60, lambda s: correctness.check_oracle(s, device, quick))
    report.run("Races", 130, lambda s: races.check(s, device, quick))
    report.run("Overlap", 140, lambda s: overlap.check(s, device, quick))
    report.run("Peak memory", 40, lambda s: memory.check_peak(s, device, quick))
    report.run("Steady state", 40, lambda s: memory.check_steady(s, device, quick))
    say(report.text())
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
