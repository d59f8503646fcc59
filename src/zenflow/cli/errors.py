"""What a command raises to end with one clear line and an exit code of its own."""


class CliError(Exception):
    """A failure with a message for the user: one line, no traceback."""

    exit_code = 1


class UsageError(CliError):
    """The command line or the input is at fault; nothing was started."""

    exit_code = 2


class RunError(CliError):
    """The run started and could not be completed."""


class Interrupted(CliError):
    """The user (SIGINT) or the system (SIGTERM) asked the run to stop, and it stopped cleanly."""

    def __init__(self, message: str, signal_number: int = 2) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def one_line(error: BaseException, limit: int = 500) -> str:
    """The message of an error as a single line of at most `limit` characters."""
    text = " ".join(str(error).split())
    if not isinstance(error, CliError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if error.__cause__ is not None and str(error.__cause__) not in text:
            text += f" (because of {one_line(error.__cause__)})"
    return text if len(text) <= limit else text[: limit - 3] + "..."
