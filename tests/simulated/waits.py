"""Every wait in the runtime, found in its source, and the runtime with one of them taken away.

A *wait* is a place where the runtime asks a ticket, or hands one on as ``after``, or calls a
function of its own that does. It is taken away by compiling its function without it and giving the
new code to the function that is already there, so callers and importers need no change.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import zenflow.optimizer
import zenflow.runtime
from zenflow.backends.ticket import FINISHED

TICKET_METHODS = ("wait", "done", "mark", "read")
"""How a ticket is asked for, asked, or (a device's ``read``) waited for at once."""
OWN_METHODS = ("_await", "await_weights", "settle", "publish_in_flight")
"""The runtime's own methods that wait and are called for it."""
OWN_FUNCTIONS = ("upload", "download")
"""Its functions that copy across the link and wait: called without, they return the target."""


@dataclass(frozen=True)
class Wait:
    """One place: the function it is in, what is called there, the how-manieth such call, and the
    statement."""

    module: str
    function: str
    call: str
    number: int
    statement: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('zenflow.')}:{self.function}:{self.call}:{self.number}"


def modules() -> list[ModuleType]:
    """Where the runtime waits: its own package, and the optimizer that drives it."""
    names = [info.name for info in pkgutil.iter_modules(zenflow.runtime.__path__)]
    found = [importlib.import_module(f"zenflow.runtime.{name}") for name in names]
    return [*found, zenflow.optimizer]


def find_waits() -> list[Wait]:
    return [wait for module in modules() for wait in _waits_of(module)]


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """The runtime without one wait."""
    module = sys.modules[wait.module]
    function = _resolve(module, wait.function)
    before = function.__code__
    definition = dict(_functions(ast.parse(_source(module))))[wait.function]
    definition.decorator_list = []
    target = [node for node, call in _calls(definition) if call == wait.call][wait.number - 1]
    tree = ast.Module([_Remover(target).visit(definition)], type_ignores=[])
    tree = ast.fix_missing_locations(tree)
    scope: dict[str, Any] = {}
    exec(compile(tree, f"<{wait}>", "exec"), function.__globals__, scope)
    names = {"_FINISHED_": FINISHED, "_unwaited_upload_": _upload, "_unwaited_download_": _download}
    function.__globals__.update(names)
    function.__code__ = scope[definition.name].__code__
    try:
        yield
    finally:
        function.__code__ = before
        for name in names:
            del function.__globals__[name]


class _Remover(ast.NodeTransformer):
    """Replaces one call by what is there without it: a finished ticket, a tensor as it is."""

    def __init__(self, target: ast.Call) -> None:
        self._target = target

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if node.value is self._target else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return _without(node) if node is self._target else self.generic_visit(node)


def _without(node: ast.Call) -> ast.expr:
    call = _called(node)
    if call in OWN_FUNCTIONS:
        return ast.Call(ast.Name(f"_unwaited_{call}_", ast.Load()), node.args, node.keywords)
    if call == "mark":
        return ast.Name("_FINISHED_", ast.Load())
    if call == "done":
        return ast.Constant(True)
    if call == "read":
        return node.args[0]
    if call in ("_await", "await_weights"):
        return ast.parse("sweep.task.result.tensor", mode="eval").body
    assert call == "wait" and isinstance(node.func, ast.Attribute), ast.dump(node)
    return ast.Attribute(node.func.value, "tensor", ast.Load())


def _upload(platform: Any, tensor: Any) -> Any:
    shared = platform.link.shared
    target = None if shared else platform.device.empty(tensor.shape, tensor.dtype)
    return platform.link.to_device(tensor, target, platform.device.mark()).tensor


def _download(platform: Any, tensor: Any) -> Any:
    shared = platform.link.shared
    target = None if shared else platform.storage.buffer(tensor.shape, tensor.dtype)
    return platform.link.to_host(tensor, target, platform.device.mark()).tensor


def _called(node: ast.Call) -> str | None:
    """The name of a call that waits; None for any other."""
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        return name if name in TICKET_METHODS + OWN_METHODS else None
    if isinstance(node.func, ast.Name) and node.func.id in OWN_FUNCTIONS:
        return node.func.id
    return None


@cache
def _source(module: ModuleType) -> str:
    """Read once: whoever edits the file while the tests run does not change what they see."""
    return inspect.getsource(module)


def _waits_of(module: ModuleType) -> Iterator[Wait]:
    for name, definition in _functions(ast.parse(_source(module))):
        counts: dict[str, int] = {}
        for node, call in _calls(definition):
            counts[call] = counts.get(call, 0) + 1
            statement = ast.unparse(_statement_of(definition, node))
            yield Wait(module.__name__, name, call, counts[call], statement)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield f"{node.name}.{part.name}", part


def _calls(definition: ast.FunctionDef) -> list[tuple[ast.Call, str]]:
    """The calls that wait, in the order of the source."""
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    waits = [(node, call) for node in calls if (call := _called(node)) is not None]
    return sorted(waits, key=lambda found: (found[0].end_lineno, found[0].end_col_offset))


def _statement_of(definition: ast.FunctionDef, node: ast.AST) -> ast.stmt:
    around = [s for s in ast.walk(definition) if isinstance(s, ast.stmt) and node in ast.walk(s)]
    return around[-1]  # ast.walk meets outer statements first


def _resolve(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found
