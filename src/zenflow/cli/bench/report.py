"""A report: what was run, where and with what; tables; and the files that it goes into."""

import argparse
import datetime
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zenflow
from zenflow.cli.errors import UsageError


def allowed_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's own name, or the machine's kind."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def system_name() -> str:
    """System, machine and C library; never the host's name."""
    return f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(", ")


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    powers = [1 << i for i in range(cores.bit_length()) if 1 << i <= cores]
    return sorted({*powers, cores})


def versions() -> dict[str, str]:
    """Of what runs in this process."""
    return {
        "zenflow": zenflow.__version__,
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        "Python": platform.python_version(),
    }


@dataclass(slots=True)
class Report:
    """What a benchmark found.

    Attributes:
        theme: begins the file names.
        title: a heading.
        facts: lines under the heading: sizes, repeats, what a column means.
        body: the rest as Markdown.
        figures: everything measured, JSON-ready.
        versions: of everything that took part.
        pictures: SVG texts by a suffix for the file name, in the order of the report.
    """

    theme: str
    title: str
    facts: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    pictures: dict[str, str] = field(default_factory=dict)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def markdown(self, command_line: Sequence[str], stem: str | None = None) -> str:
        """The report; it shows its pictures if ``stem`` says where they are."""
        head = [f"- {name}: {text}" for name, text in self._head(command_line).items()]
        shown = []
        if stem is not None:
            for suffix in self.pictures:
                shown += [f"![{suffix}]({stem}_{suffix}.svg)", ""]
        lines = [f"# {self.title}", "", *head, *(f"- {fact}" for fact in self.facts), ""]
        return "\n".join([*lines, *shown, *self.body]).rstrip() + "\n"

    def to_json(self, command_line: Sequence[str]) -> str:
        """The head and the figures."""
        content = {"head": self._head(command_line), "facts": self.facts, "figures": self.figures}
        return json.dumps(content, indent=1) + "\n"

    def _head(self, command_line: Sequence[str]) -> dict[str, str]:
        return {
            "Command": f"`{shown_command(command_line)}`",
            "Date": str(datetime.date.today()),
            "Hardware": f"{cpu_name()}, {allowed_cores()} cores allowed",
            "System": system_name(),
            "Versions": ", ".join(f"{name} {text}" for name, text in self.versions.items()),
            "Load average before and after": f"{self.load_before:.2f}, {os.getloadavg()[0]:.2f}",
        }


def shown_command(command_line: Sequence[str]) -> str:
    """The command as a reader can repeat it: where files lie on this machine is left out."""
    words = [
        re.sub(r"(^|=)/\S*", r"\1PATH", word) if "/" in word else word for word in command_line
    ]
    return " ".join(["zenflow", *words])


@dataclass(frozen=True, slots=True)
class Target:
    """Where a report goes: a Markdown file, or a folder in which it names itself."""

    path: Path

    def check(self) -> None:
        """Refuse what cannot be written before anything is measured.

        Raises:
            UsageError: with the reason.
        """
        if self.path.suffix not in ("", ".md"):
            raise UsageError(f"--output {self.path} is neither a .md file nor a folder")
        folder = self.path if not self.path.suffix else self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {self.path} cannot be made: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise UsageError(f"--output {self.path} cannot be written to")

    def write(self, report: Report, command_line: Sequence[str]) -> list[Path]:
        """Write Markdown, JSON and pictures; returns the files."""
        markdown = self.path
        if not markdown.suffix:
            markdown /= f"{report.theme}_{hardware_slug()}_{datetime.date.today()}.md"
        stem = markdown.with_suffix("")
        contents = {
            markdown: report.markdown(command_line, stem.name),
            markdown.with_suffix(".json"): report.to_json(command_line),
        }
        for suffix, svg in report.pictures.items():
            contents[stem.with_name(f"{stem.name}_{suffix}.svg")] = svg
        for path, text in contents.items():
            path.write_text(text, encoding="utf-8", newline="\n")
        return list(contents)


def hardware_slug() -> str:
    """The processor's family, its vector width and the cores: ``xeon-avx512-2core``."""
    noise = {"intel", "amd", "processor", "cpu", "core", "r", "tm", "with"}
    words = re.findall(r"[a-z]+", cpu_name().lower())
    family = next((word for word in words if word not in noise), platform.machine())
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    return f"{family}-{capability}-{allowed_cores()}core"


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--output``."""
    parser.add_argument(
        "--output",
        type=lambda text: Target(Path(text)),
        metavar="FILE.md|DIR",
        help="write the report there, its figures beside it as JSON, plots as SVG; in a folder it "
        "is named after the benchmark, the hardware and the date. Default: print only",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table, followed by an empty line."""
    lines = [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
    ]
    return [*lines, ""]
