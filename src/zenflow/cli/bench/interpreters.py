"""Running a module of this package in a process of its own, in this or another interpreter.

The other one has DeepSpeed and its own torch. This package is given to it alone, by the file that
it is in, so that nothing else of this installation gets onto its path.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zenflow
from zenflow.cli.errors import UsageError, one_line

_BOOT = """
import importlib, importlib.util, sys
package = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("zenflow", package)
module = sys.modules["zenflow"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
importlib.import_module(sys.argv.pop(1)).main()
"""
_ANSWER = "zenflow-answer "
_START_S = 120.0


def command_in(python: str, module: str, *arguments: str) -> list[str]:
    """The command that runs ``main()`` of one of our modules in an interpreter."""
    package = str(Path(zenflow.__file__).resolve())
    return [python, "-c", _BOOT, package, module, *arguments]


def reply_channel() -> Callable[[Any], None]:
    """In a child: keep standard output for answers and send what libraries print to the errors."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def reply(content: Any) -> None:
        out.write(f"{_ANSWER}{json.dumps(content)}\n")
        out.flush()

    return reply


def read_answer(lines: Iterable[str]) -> Any:
    """The next answer in a child's output; None if it ended without one."""
    for line in lines:
        if line.startswith(_ANSWER):
            return json.loads(line[len(_ANSWER) :])
    return None


def add_deepspeed_python(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--deepspeed-python``."""
    parser.add_argument(
        "--deepspeed-python",
        metavar="PATH",
        help=f"a Python interpreter that has DeepSpeed 0.19.6 (`make deepspeed` makes one): {what}. "
        "Default: without DeepSpeed",
    )


def check_deepspeed_python(python: str, *modules: str) -> str:
    """DeepSpeed's version in an interpreter.

    Args:
        modules: others that have to be there.

    Raises:
        UsageError: if it cannot be started or something is missing.
    """
    names = ["torch", "deepspeed", *modules]
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        f"missing = [name for name in {names!r} if u.find_spec(name) is None]\n"
        "print(','.join(missing) or '-', '-' if missing else m.version('deepspeed'))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_START_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--deepspeed-python {python}: {one_line(error)}") from error
    words = done.stdout.split()
    if done.returncode or len(words) != 2:
        raise UsageError(f"--deepspeed-python {python} does not work: {done.stderr.strip()[-300:]}")
    if words[0] != "-":
        raise UsageError(
            f"--deepspeed-python {python} has no {words[0].replace(',', ' and no ')}; "
            "`make deepspeed` makes an interpreter that has all"
        )
    return words[1]


def deepspeed_environment(python: str) -> dict[str, str]:
    """What DeepSpeed wants to find: the CPU, one process, a free port, its tools on the path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
    }


def main() -> None:
    """For the tests: answer with the interpreter and the arguments."""
    reply_channel()([sys.executable, *sys.argv[1:]])
