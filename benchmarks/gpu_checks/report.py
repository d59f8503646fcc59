"""A report that is complete up to the last finished section, whatever happens next."""

import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType


@dataclass
class Section:
    """What one section found."""

    title: str
    budget_s: float
    lines: list[str] = field(default_factory=list)
    num_passed: int = 0
    failures: list[str] = field(default_factory=list)
    begin_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Of its budget. A section ends by itself when nothing is left."""
        return self.budget_s - (time.monotonic() - self.begin_s)

    def check(self, what: str, passed: bool, detail: str = "") -> None:
        """Count a check; only one that fails takes a line."""
        if passed:
            self.num_passed += 1
        else:
            self.failures.append(what)
            self.note(f"**failed**: {what}" + (f" ({detail})" if detail else ""))

    def note(self, text: str) -> None:
        """One point of a list."""
        self.lines.append(f"- {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of its own paragraph."""
        bar = ["---"] * len(header)
        self.lines += ["", *("| " + " | ".join(row) + " |" for row in (header, bar, *rows)), ""]

    def ran_out(self, what: str) -> bool:
        """Whether the budget is used up; then says what is left out."""
        if self.left_s > 0:
            return False
        self.note(f"left out, the section's {self.budget_s:.0f} s are used up: {what}")
        return True


class Report:
    """Runs sections and writes the report after each of them.

    Args:
        path: of the report; None for standard output alone.
        heading: lines before the first section.
    """

    def __init__(self, path: Path | None, heading: Sequence[str]) -> None:
        self._path = path
        self._heading = list(heading)
        self.sections: list[Section] = []

    def run(self, title: str, budget_s: float, body: Callable[[Section], None]) -> None:
        """One section. What it raises fails it, and a hang ends it at twice its budget."""
        section = Section(title, budget_s)
        self.sections.append(section)
        say(f"{title} (at most {budget_s:.0f} s)")
        try:
            with _limit(2 * budget_s):
                body(section)
        except Exception as error:
            section.failures.append(repr(error))
            text = "".join(traceback.format_exception(error)).rstrip().splitlines()
            section.lines += ["", "```", *text[-25:], "```", ""]
        section.lines.append("")
        self._write()
        took_s = time.monotonic() - section.begin_s
        say(f"  {_verdict(section)} in {took_s:.1f} s")
        for failure in section.failures:
            say(f"  failed: {failure}")

    @property
    def failed(self) -> bool:
        return any(section.failures for section in self.sections)

    def text(self) -> str:
        lines = [*self._heading, ""]
        for section in self.sections:
            lines += [f"## {section.title}", "", f"{_verdict(section)}.", "", *section.lines]
        return "\n".join(lines).rstrip() + "\n"

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self.text(), encoding="utf-8")


def say(text: str) -> None:
    """A line for whoever is watching."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _verdict(section: Section) -> str:
    failed = f", {len(section.failures)} failed" if section.failures else ""
    return f"{section.num_passed} checks passed{failed}"


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise in this thread after so long; if it does not react, end the process, with a traceback."""

    def expire(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 20, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
