"""Every block of the README is executed, each kind in its own way.

- ``python``: all blocks in order, in one fresh interpreter and an empty folder.
- ``bash``: each line by its command. ``make`` runs with ``-n`` (the target must exist); ``pip install``
  with ``--dry-run --no-deps`` (the project builds its metadata and states the extra). ``zenflow`` lines
  run in order in one folder that has the model and data they name, with ``--max-steps 2`` added.
- ``text``: the annotated tree; each path in it must exist.

A block of another kind or an unknown command fails, so nothing escapes unread.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    language: str
    line: int
    code: str


def blocks(*languages: str) -> list[Block]:
    """Fenced blocks of the README, with the line that each one's code starts at."""
    found, opened = [], None
    for number, line in enumerate(README.splitlines(), start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line[3:].strip()
        else:
            code = "\n".join(README.splitlines()[opened[0] : number - 1])
            found.append(Block(opened[1], opened[0] + 1, code))
            opened = None
    assert opened is None, f"the block opened in line {opened} is not closed"
    return [block for block in found if not languages or block.language in languages]


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.code.splitlines()]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run(args: list[str], cwd: Path, timeout_s: float = 120) -> str:
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{shlex.join(args)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_no_block_of_an_unknown_kind():
    assert {block.language for block in blocks()} <= {"python", "bash", "text"}


def test_python_blocks_run_in_order(tmp_path):
    script = "namespace = {'__name__': '__main__'}\n" + "".join(
        f"exec(compile({chr(10) * (block.line - 1) + block.code!r}, 'README.md', 'exec'), namespace)\n"
        for block in blocks("python")
    )
    assert blocks("python")
    run([sys.executable, "-W", "error", "-c", script], cwd=tmp_path)


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("zenflow ")])
def test_command(command):
    program, *args = shlex.split(command, comments=True)
    match program, args:
        case "make", [target]:
            phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
            assert target in phony[1].split()
            assert run(["make", "-n", target], cwd=ROOT)
        case "pip", ["install", *rest]:
            pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
            assert "Would install torch-zenflow" in run(
                [*pip, "--no-build-isolation", *rest], cwd=ROOT
            )
            pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
            for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", rest[-1]))):
                assert re.search(rf"^{extra} = \[", pyproject, re.M), extra
        case _:
            pytest.fail(f"no test knows how to execute {command!r}")


@pytest.mark.slow
def test_zenflow_commands(tmp_path):
    lines = [shlex.split(c, comments=True)[1:] for c in commands() if c.startswith("zenflow ")]
    assert lines
    rows = [{"text": f"Film {i} was worth seeing, and seen. " * 20} for i in range(40)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    zenflow = [sys.executable, "-m", "zenflow.cli"]
    short = ["--max-steps", "2", "--batch-size", "2", "--max-length", "32"]
    run([*zenflow, "finetune", *short, "--output", "path/to/model"], cwd=tmp_path, timeout_s=300)
    for line in lines:
        run([*zenflow, *line, *short], cwd=tmp_path, timeout_s=300)
        if "--output" in line:
            output = tmp_path / line[line.index("--output") + 1]
            assert (output / "summary.json").exists()


def test_paths_of_the_tree_exist():
    (tree,) = blocks("text")
    parents: list[str] = []
    for line in tree.code.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        parents[len(indent) // 2 :] = [name]
        path = ROOT / "/".join(parents)
        assert path.is_dir() if name.endswith("/") else path.is_file(), line


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
