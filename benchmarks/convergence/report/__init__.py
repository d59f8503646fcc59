"""Tables, plots and the page docs/convergence.md, from the committed results alone."""

from benchmarks.convergence.report.page import write_report

__all__ = ["write_report"]
