"""Resident memory of a process and its children, from the kernel's own figures (Linux)."""

import os
from pathlib import Path


def family() -> list[int]:
    """This process and everything it has started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def sample() -> int:
    """Resident bytes of the family, each shared page counted once (proportional set size)."""
    return sum(map(_proportional_bytes, family()))


def _proportional_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
