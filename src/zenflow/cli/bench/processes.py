"""The parent's side: contenders in processes of their own, which take turns."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zenflow.cli.bench.contenders import Contender
from zenflow.cli.bench.interpreters import command_in, deepspeed_environment, read_answer
from zenflow.cli.errors import RunError
from zenflow.runtime.memory import available_memory

_END_S = 30.0
_MEMORY_SHARE = 0.85
"""Of the available memory that contenders may fill."""


class Child:
    """One contender's process, idle between requests."""

    def __init__(
        self,
        contender: Contender,
        workload: dict[str, Any],
        *,
        deepspeed_python: str | None = None,
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.contender = contender
        self._messages = tempfile.TemporaryFile(  # noqa: SIM115 - closed with the process
            "w+", encoding="utf-8", errors="replace"
        )
        other = contender.engine == "deepspeed"
        assert deepspeed_python is not None or not other
        python = deepspeed_python if other and deepspeed_python else sys.executable
        self._process = subprocess.Popen(
            command_in(python, "zenflow.cli.bench.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=deepspeed_environment(python) if other else os.environ,
            text=True,
        )
        self.about = self.ask(
            "begin",
            workload=workload,
            contender=contender.to_dict(),
            link_bytes_per_s=link_bytes_per_s if contender.is_ours else None,
        )

    def ask(self, do: str, **request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            RunError: if the child failed, with the end of what it said.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            answer = read_answer(self._process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None or "error" in answer:
            reason = "it ended" if answer is None else answer["error"]
            raise RunError(f"{self.contender.name} failed: {reason}; {self._last_words()}")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._messages.close()

    def _last_words(self) -> str:
        self._messages.seek(0)
        words = " ".join(self._messages.read()[-600:].split())
        return f"its last words: {words}" if words else "it said nothing"


class Turns:
    """Contenders that take turns: all of them alive if memory allows, else each started anew.

    Attributes:
        all_alive: whether they fit together.
        about: of each contender that has started, what its process says of itself.
    """

    def __init__(
        self, contenders: list[Contender], numel: int, workload: dict[str, Any], **options: Any
    ) -> None:
        self._workload = workload
        self._options = options
        self._children: dict[str, Child] = {}
        self.about: dict[str, dict[str, Any]] = {}
        need = sum(contender.bytes_per_parameter for contender in contenders) * numel
        available = available_memory()
        self.all_alive = available is None or need <= _MEMORY_SHARE * available.num_bytes

    @contextmanager
    def turn(self, contender: Contender) -> Iterator[Child]:
        """The contender's process, for some requests."""
        child = self._children.get(contender.name)
        if child is None:
            child = self._children[contender.name] = Child(
                contender, self._workload, **self._options
            )
            self.about[contender.name] = child.about
        yield child
        if not self.all_alive:
            self._children.pop(contender.name).close()

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()
