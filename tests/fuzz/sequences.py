"""Random sequences of calls on a :class:`pair.Pair`; a failing one is shrunk and becomes a script."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from pair import Pair

NUM_CALLS = 40
SHAPES = (
    ((40, 24), (24,), (), (0,), (33, 17), (6, 12, 3, 3), (5, 9, 4)),
    ((9, 8), (64, 1), (1, 64), (3, 3), (40, 30)),
    ((700, 100), (17, 31)),  # the first is cut into row blocks
)
LATER_SHAPES = (((20, 30), (30,)), ((8, 16),), ((5,), (2, 40, 2)))


@dataclass(frozen=True)
class Call:
    """A method of :class:`Pair` and its arguments."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})"


@dataclass(frozen=True)
class Sequence:
    """How a pair is made, and what is done with it."""

    setup: dict[str, Any]
    calls: tuple[Call, ...]

    def run(self) -> None:
        """Raises what goes wrong."""
        pair = Pair(**self.setup)
        try:
            for call in self.calls:
                getattr(pair, call.name)(**call.arguments)
            pair.end()
        finally:
            pair.close()

    def error(self) -> BaseException | None:
        """What goes wrong."""
        try:
            self.run()
        except Exception as error:
            return error
        return None

    def script(self) -> str:
        """A program that does the same; to be run from the root of the repository."""
        setup = "".join(f"    {name}={value!r},\n" for name, value in self.setup.items())
        calls = "".join(f"pair.{call}\n" for call in self.calls)
        return (
            "import sys\n\nimport torch\n\n"
            'sys.path[:0] = ["tests/fuzz", "tests/oracle"]\n'
            "from pair import Pair\n\n"
            "torch.set_num_threads(1)\n"
            f"pair = Pair(\n{setup})\n{calls}pair.end()\n"
        )


def draw(number: int) -> Sequence:
    """The sequence of this number, always the same."""
    choose = random.Random(number)
    config = _draw_config(choose)
    clips = config["max_grad_norm"] is not None
    setup = {
        "seed": number,
        "shapes": choose.choice(SHAPES[:2] * 3 + SHAPES[2:]),
        "dtype": choose.choice(["float32", "float32", "bfloat16", "float16"]),
        "config": config,
        # A norm is added in the order of memory, which may change its last bit; see also streaming.
        "transposed": choose.random() < 0.3 and not clips,
        "linked": choose.random() < 0.5,
    }
    calls = tuple(_draw_call(choose, may_stream=not clips) for _ in range(NUM_CALLS))
    return Sequence(setup, calls)


def _draw_config(choose: random.Random) -> dict[str, Any]:
    clips = choose.random() < 0.3
    overlap = choose.random() < 0.7
    intervals = [1, 2, 3, 4, *(() if overlap else ("auto",))]  # overlapped, "auto" takes the time
    return {
        "update_interval": choose.choice(intervals),
        "topk_ratio": choose.choice([0, 0.05, 0.1, 0.3, 1]),
        "update_rule": choose.choice(["replay", "replay", "accumulate"]),
        "lookahead": choose.random() < 0.6,
        "preview": choose.random() < 0.8,
        "overlap_step": overlap,
        "select_interval": choose.choice([1, 3, "auto"]),
        "full_warm_up_rounds": choose.choice([0, 0, 0, 3]),
        "host_threads": choose.choice([1, 3]),
        "max_grad_norm": 1.0 if clips else None,
        # Streamed norms are added in the order of the backward pass, which may change the last bit.
        "stream_gradients": not clips and choose.random() < 0.4,
    }


def _draw_step(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"seed": choose.randrange(10**6)}
    if choose.random() < 0.25:
        arguments["parts"] = choose.randint(2, 4)
    if choose.random() < 0.1:
        arguments["bad"] = True
    if choose.random() < 0.1:
        arguments["dropped"] = True
    if choose.random() < 0.15:
        arguments["between"] = choose.choice(["edit", "synchronize", "look", "save"])
    return arguments


def _draw_edit(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    how = choose.choice(["in place", "data", "memory", "load_state_dict"])
    return {"seed": choose.randrange(10**6), "how": how}


def _draw_load(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    return {
        "which": choose.randrange(100),
        "into": choose.choice(["same", "new"]),
        "weights": choose.choice(["first", "after", "kept"]),
        **_draw_reopen(choose, may_stream),
    }


def _draw_reopen(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    return {
        "stream": choose.random() < 0.5 if may_stream else None,
        "linked": choose.random() < 0.5,
    }


def _draw_add_group(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    return {"seed": choose.randrange(10**6), "shapes": choose.choice(LATER_SHAPES)}


def _draw_seed(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    return {"seed": choose.randrange(10**6)}


def _draw_nothing(choose: random.Random, may_stream: bool) -> dict[str, Any]:
    return {}


Draw = Callable[[random.Random, bool], dict[str, Any]]
CALLS: dict[str, tuple[int, Draw]] = {
    "step": (55, _draw_step),
    "hyper": (8, _draw_seed),
    "freeze": (6, _draw_seed),
    "edit": (5, _draw_edit),
    "save": (5, _draw_nothing),
    "load": (5, _draw_load),
    "look": (4, _draw_nothing),
    "synchronize": (4, _draw_nothing),
    "reopen": (3, _draw_reopen),
    "add_group": (2, _draw_add_group),
    "idle": (2, _draw_nothing),
}
"""Each call with how often it is drawn."""


def _draw_call(choose: random.Random, may_stream: bool) -> Call:
    (name,) = choose.choices(list(CALLS), [weight for weight, _ in CALLS.values()])
    return Call(name, CALLS[name][1](choose, may_stream))


def shrink(sequence: Sequence, seconds: float = 20.0) -> Sequence:
    """Drop calls, half of them at a time and then fewer, as long as it still fails."""
    until = monotonic() + seconds
    size = max(1, len(sequence.calls) // 2)
    while size:
        dropped = False
        for shorter in _without(sequence, size):
            if monotonic() > until:
                return sequence
            if shorter.error() is not None:
                sequence, dropped = shorter, True
                break
        if not dropped:
            size //= 2
        size = min(size, len(sequence.calls))
    return sequence


def _without(sequence: Sequence, size: int) -> Iterator[Sequence]:
    calls = sequence.calls
    for start in reversed(range(0, len(calls), size)):
        yield replace(sequence, calls=calls[:start] + calls[start + size :])


def report(sequence: Sequence, seconds: float = 20.0) -> str | None:
    """None if all is well; else what went wrong and, shrunk, the script that shows it."""
    if sequence.error() is None:
        return None
    shrunk = shrink(sequence, seconds)
    return f"{shrunk.error()!r}\n\n{shrunk.script()}"
