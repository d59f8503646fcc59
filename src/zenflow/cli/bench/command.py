"""The subcommand: one benchmark of several, each with flags of its own."""

import argparse

from zenflow.cli.bench import kernel, memory, overlap, train
from zenflow.cli.bench.report import add_output

NAME = "bench"
SUMMARY = "measure the host kernel, the overlap, training speed or host memory"
DESCRIPTION = """\
Measure this machine. Each benchmark puts its contenders side by side in one run and prints a
report; with --output it also writes the report, and its figures as JSON, to files.
"""

_BENCHMARKS = (kernel, overlap, train, memory)
"""Each has NAME, SUMMARY, DESCRIPTION, add_arguments(parser) and run(arguments) -> Report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks to a parser."""
    benchmarks = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, prog="zenflow bench"
    )
    for benchmark in _BENCHMARKS:
        sub = benchmarks.add_parser(
            benchmark.NAME,
            help=benchmark.SUMMARY,
            description=benchmark.DESCRIPTION,
            usage=f"zenflow bench {benchmark.NAME} [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        benchmark.add_arguments(sub)
        add_output(sub)
        sub.set_defaults(benchmark=benchmark)


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark with parsed arguments and return the exit code.

    Raises:
        CliError: with one line for the user.
    """
    target = arguments.output
    if target is not None:
        target.check()
    report = arguments.benchmark.run(arguments)
    print(report.markdown(arguments.command_line))
    if target is not None:
        for path in target.write(report, arguments.command_line):
            print(f"wrote {path}")
    return 0
