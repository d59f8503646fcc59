"""The entry point of the ``zenflow`` command: parse, run a subcommand, turn errors into one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import zenflow
from zenflow.cli.bench import command as bench
from zenflow.cli.doctor import command as doctor
from zenflow.cli.errors import CliError, Interrupted, one_line
from zenflow.cli.finetune import command as finetune
from zenflow.cli.inspect import command as inspect

_COMMANDS = (finetune, inspect, bench, doctor)
"""Each has NAME, SUMMARY, add_arguments(parser) and run(arguments) -> exit code."""


class _Parser(argparse.ArgumentParser):
    """argparse with the one-line errors of the rest of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"zenflow: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. Imports nothing heavier than torch."""
    parser = _Parser(
        prog="zenflow",
        description="Train with AdamW's state in host memory and without waiting for it (ZenFlow).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zenflow {zenflow.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            usage=f"zenflow {command.NAME} [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks and library logs")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``zenflow`` command.

    Args:
        argv: the command line without the program's name; None for that of the process.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the command line or the input is at fault,
        128 + the signal's number if the run was asked to stop (130 for Ctrl-C).
    """
    arguments = build_parser().parse_args(argv)
    arguments.command_line = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        error: BaseException = Interrupted("interrupted; nothing more was saved")
    except Exception as caught:
        if arguments.debug:
            raise
        error = caught
    label = "" if isinstance(error, Interrupted) else "error: "
    print(f"zenflow: {label}{one_line(error)}", file=sys.stderr)
    return error.exit_code if isinstance(error, CliError) else 1


if __name__ == "__main__":
    sys.exit(main())
