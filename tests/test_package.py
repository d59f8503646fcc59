"""What `import zenflow` gives and what it costs."""

import ast
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import zenflow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "zenflow"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORT = """
import json, sys, threading, time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
before = set(sys.modules)
import zenflow
end = time.perf_counter()
print(json.dumps({
    "torch_s": middle - begin,
    "zenflow_s": end - middle,
    "packages": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "threads": [thread.name for thread in threading.enumerate()],
}))
"""


@pytest.fixture(scope="module")
def fresh_import():
    """What a fresh interpreter sees when it imports torch, then zenflow."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def imported_packages(*folders_or_files: Path) -> set[str]:
    """First names of all absolute imports in the given sources, inside functions too."""
    files = [
        file
        for path in folders_or_files
        for file in (path.rglob("*.py") if path.is_dir() else [path])
    ]
    names = set()
    for node in (n for file in files for n in ast.walk(ast.parse(file.read_text("utf-8")))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"zenflow"}


def extra_packages() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    return {re.match(r"[\w.-]+", r)[0] for name in extras if name != "dev" for r in extras[name]}


def test_public_names():
    assert zenflow.__all__ == ["StepStats", "ZenFlowAdamW", "ZenFlowConfig", "__version__"]
    public = {
        name
        for name, value in vars(zenflow).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(zenflow.__all__) - {"__version__"}


def test_import_pulls_in_torch_and_nothing_heavier(fresh_import):
    assert set(fresh_import["packages"]) - set(sys.stdlib_module_names) == {"zenflow"}


def test_import_costs_a_small_part_of_torchs(fresh_import):
    assert fresh_import["zenflow_s"] < 0.25 * fresh_import["torch_s"]


def test_import_starts_no_thread(fresh_import):
    assert fresh_import["threads"] == ["MainThread"]


def test_the_library_names_no_package_but_torch():
    optional = {SOURCE / "cli", SOURCE / "integrations"}
    library = [
        path for path in SOURCE.iterdir() if path not in optional and path.suffix != ".typed"
    ]
    assert imported_packages(*library) == {"torch"}


def test_what_the_command_line_and_the_integrations_import_is_in_an_extra():
    optional = [path for path in (SOURCE / "cli", SOURCE / "integrations") if path.exists()]
    assert imported_packages(*optional) - {"torch"} <= extra_packages()


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").exists()
