"""Write docs/compatibility.md: what goes wrong elsewhere, what ours does, and the test that holds it.

    python docs/make_compatibility.py

A test says what it holds by ``@pytest.mark.covers("name of a row", ...)``. Tests are found in their source,
without importing them. A row without a test is listed as not yet held; a mark that names no row is an
error.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).with_name("compatibility.md")
TESTS = Path(__file__).resolve().parents[1] / "tests"

HEAD = """\
<!-- Written by docs/make_compatibility.py from marks on the tests. Do not edit. -->

# Compatibility

What training loops do, what goes wrong for users of offloaded optimizers, and which test holds that it
does not go wrong here. Each test compares with `torch.optim.AdamW` where the values must be AdamW's, and
else with a sequential program of the exact semantics ([design.md](design.md)).
"""


class Row(NamedTuple):
    """A kind of fault.

    Attributes:
        name: what tests refer to.
        elsewhere: what users have seen.
        ours: what ours does instead.
        open: what of it no test holds yet.
    """

    name: str
    elsewhere: str
    ours: str
    open: str = ""


FAULTS: dict[str, list[Row]] = {
    "Wrong updates": [
        Row(
            "several backward passes",
            "of several backward passes before a step, only one counts",
            "all add up, whether gradients are read in `step()` or streamed",
        ),
        Row(
            "hyperparameters of each group",
            "the host's update knows one group's lr, or no weight decay, betas, eps",
            "each gradient carries its group's values of its own step; groups added later too",
        ),
        Row(
            "learning rate schedules",
            "a scheduler refuses the optimizer, or its rate arrives late",
            "every schedule works; a rate of 0 in the first step moves nothing",
        ),
        Row(
            "parameters without a gradient",
            "one unused parameter crashes the step or shifts the others",
            "frozen, unused, now and then used, unfrozen later: as AdamW treats them",
        ),
        Row(
            "shapes",
            "only matrices train; others crash or are transposed",
            "any number of dimensions, none, no elements, odd sizes, any strides",
        ),
        Row(
            "biases before weights",
            "the order of parameters shifts which channels are selected",
            "each weight selects the largest by its own gradient",
        ),
        Row(
            "tied weights",
            "a shared weight is updated once for each name",
            "one state, one update",
        ),
        Row(
            "16-bit state",
            "a step count in bf16 stops at 256; a bf16 master drops small updates",
            "all state is fp32; 1,000 tiny steps follow AdamW in fp64",
        ),
        Row(
            "moments at reselection",
            "moments are reset and the step count is not: steps several times too large",
            "moments move along; with a constant gradient no step exceeds the rate",
        ),
        Row(
            "order of copies and compute",
            "a copy begins before its data is there, or memory is reused too early",
            "each wait is there and needed, shown with copies that take effect as late as they may",
            "on a real accelerator",
        ),
        Row(
            "decoupled decay",
            "the decay is Adam's and not AdamW's",
            "weights shrink by lr times decay, exactly",
        ),
    ],
    "Clipping and overflow": [
        Row(
            "clipping",
            "refused, silently off, or applied to a part of the gradients",
            "torch's clipping functions and `max_grad_norm` scale every gradient",
        ),
        Row(
            "a gradient that is not finite",
            "one inf spoils the moments for good, or half the weights are updated",
            "the step is skipped whole and the parameter named; counts agree with GradScaler",
        ),
    ],
    "Saving and resuming": [
        Row(
            "resume",
            "moments or counters are lost and the loss jumps",
            "bit for bit from any step, in another process, after a kill",
        ),
        Row(
            "pending steps",
            "the last gradients are never applied",
            "applied on exit, on `close()`, before trainers save or evaluate, for a model that was given; "
            "else a warning says how many there are when the model is saved or evaluated",
        ),
        Row(
            "exported weights",
            "saved weights are scrambled or stale",
            "a saved model has the loss that was reported, after loading it again",
        ),
        Row(
            "the optimizer's state as plain AdamW has it",
            "states cannot be exchanged with AdamW, or need unpickling of code",
            "both ways, and loadable with `weights_only=True`",
        ),
        Row(
            "weights written by the user",
            "weights loaded after the optimizer was built are overwritten by its older copy",
            "found and kept, through whichever way they were written",
        ),
        Row(
            "a state that does not fit",
            "half of a wrong checkpoint is loaded before the error",
            "refused by name before anything changes: damage, another model, another order",
        ),
        Row(
            "memory at load",
            "resuming needs twice the memory and is killed",
            "at most 1.15 times that of training",
        ),
    ],
    "Memory and processes": [
        Row(
            "host memory",
            "the process is killed without a word",
            "the need is compared with what there is, limits of containers included, before it is taken",
        ),
        Row(
            "pinned memory",
            "pinning fails and training stops",
            "pageable memory, with one warning",
            "nothing is pinned while the CPU is the device",
        ),
        Row(
            "memory over time",
            "memory grows with steps, saves, new optimizers",
            "flat over 300 steps, 20 saves and evaluations, 50 optimizers",
        ),
        Row(
            "ends with its process",
            "hangs at exit, and workers that outlive their parent",
            "Ctrl-C, signals, exceptions, forks: gone within 5 s, state whole or said to be lost",
        ),
        Row(
            "failed workers",
            "a failed worker hangs the loop",
            "the next call raises with the cause",
        ),
        Row(
            "slow is not dead",
            "a slow CPU is taken for a deadlock by a fixed timeout",
            "what is watched is progress; a long wait is reported with what it waits for",
        ),
    ],
    "Installation and speed": [
        Row(
            "no compiler",
            "the build fails, or begins in the middle of training",
            "works without one and says so; nothing is compiled at run time",
        ),
        Row(
            "fast on the host",
            "a host update far below the memory's bandwidth, on one thread",
            "vector instructions with the same bits as plain torch; `zenflow doctor` says which serve",
        ),
        Row(
            "bound cores",
            "cores have to be bound by hand",
            "workers are bound to physical cores of the process's share, beside the training thread's",
        ),
        Row(
            "overlap that can be seen",
            "overlap is off and nobody is told",
            "each step's stall, traffic and staleness are in its figures",
        ),
        Row(
            "the update interval and accumulation",
            "the interval overwrites the trainer's accumulation, or the default divides by zero",
            "they do not meet; the defaults train as documented",
        ),
    ],
}

FEATURES = (
    "plain loops",
    "autocast and GradScaler",
    "torch.compile",
    "activation checkpointing",
    "weight averages",
    "closures",
    "gradients in foreign memory",
    "groups added later",
    "several optimizers",
    "DataLoader workers",
    "optimizer hooks",
    "streaming capture",
    "schedules of transformers",
    "Hugging Face Trainer",
    "TRL SFTTrainer",
    "Accelerate",
    "Lightning",
    "Fabric",
    "distributed training",
    "zenflow finetune",
    "refused by name: what is not supported",
    "all of it in any order",
)


class Test(NamedTuple):
    """A test function and the rows that it says it holds."""

    file: str
    name: str
    rows: tuple[str, ...]


def collect(tests: Path = TESTS) -> list[Test]:
    """All marked tests, by file and in their order there."""
    return [test for path in sorted(tests.rglob("test_*.py")) for test in _marked(path, tests)]


def _marked(path: Path, tests: Path) -> Iterator[Test]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            rows = tuple(row for decorator in node.decorator_list for row in _rows(decorator))
            if rows:
                yield Test(path.relative_to(tests).as_posix(), node.name, rows)


def _rows(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def page(tests: list[Test]) -> str:
    """The whole file.

    Raises:
        ValueError: if a test names a row that does not exist.
    """
    known = {row.name for rows in FAULTS.values() for row in rows} | set(FEATURES)
    for test in tests:
        for name in set(test.rows) - known:
            raise ValueError(f"tests/{test.file}::{test.name} covers {name!r}, which is no row")
    parts = [
        HEAD,
        "## Loops and features\n",
        _table("| | held by |", map(_feature, FEATURES), tests),
    ]
    for title, rows in FAULTS.items():
        lines = (
            (row.name, f"**{row.name}**: {row.elsewhere} | {row.ours}", row.open) for row in rows
        )
        parts += [f"## {title}\n", _table("| seen elsewhere | ours | held by |", lines, tests)]
    return "\n".join(parts)


def _feature(name: str) -> tuple[str, str, str]:
    return name, name, ""


def _table(head: str, lines: Iterator[tuple[str, str, str]], tests: list[Test]) -> str:
    rule = "|---" * (head.count("|") - 1) + "|"
    body = [f"| {text} | {_held(name, missing, tests)} |" for name, text, missing in lines]
    return "\n".join([head, rule, *body, ""])


def _held(name: str, missing: str, tests: list[Test]) -> str:
    links = [f"[{t.name}](../tests/{t.file})" for t in tests if name in t.rows]
    if not links or missing:
        links.append(f"*not yet{f': {missing}' if missing else ''}*")
    return ", ".join(links)


if __name__ == "__main__":
    TARGET.write_text(page(collect()), encoding="utf-8")
