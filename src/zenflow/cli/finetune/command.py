"""The subcommand: its name, its help, and from arguments to a run."""

import argparse

from zenflow.cli.errors import UsageError
from zenflow.cli.finetune import arguments as _arguments
from zenflow.cli.finetune.outputs import OutputDir, choose_output
from zenflow.cli.finetune.settings import Settings, given_values, merge_for_resume

NAME = "finetune"
SUMMARY = "fine-tune a causal language model on text"
DESCRIPTION = """\
Fine-tune all weights of a causal language model with ZenFlow, through TRL's SFTTrainer.

With no arguments it trains a small model with random weights on Python's own documentation,
offline, in a few minutes: to see it work. For real use:

  zenflow finetune --model DIR_OR_HUB_ID --data FILE.jsonl --output DIR
"""

add_arguments = _arguments.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Run ``zenflow finetune`` with parsed arguments and return the exit code.

    Raises:
        CliError: with one line for the user.
    """
    output = OutputDir(choose_output(arguments.output, resume=arguments.resume))
    given = given_values(arguments)
    if arguments.resume:
        if arguments.overwrite:
            raise UsageError("--resume continues a run and --overwrite replaces it; give one")
        record = output.read_record()
        settings = Settings.resolve(merge_for_resume(given, record.settings))
    else:
        record = None
        settings = Settings.resolve(given)
    from zenflow.cli.finetune.run import finetune

    finetune(
        settings,
        output,
        record=record,
        overwrite=arguments.overwrite,
        debug=arguments.debug,
    )
    return 0
