"""What the fuzz test has found, each as its shortest sequence."""

from typing import Any

import pytest
from sequences import Call, Sequence

pytestmark = pytest.mark.usefixtures("one_thread")


def sequence(*calls: tuple[str, dict[str, Any]], **changed: Any) -> Sequence:
    """On two matrices and a vector, unless ``changed`` says otherwise."""
    setup: dict[str, Any] = {"seed": 1, "shapes": ((40, 24), (33, 17), (24,)), "dtype": "float32"}
    config = {"update_interval": 3, "topk_ratio": 0.1, "select_interval": 3} | changed.pop(
        "config", {}
    )
    return Sequence(
        setup | {"config": config} | changed, tuple(Call(name, rest) for name, rest in calls)
    )


def step(seed: int, **rest: Any) -> tuple[str, dict[str, Any]]:
    return "step", {"seed": seed} | rest


def edit(how: str, seed: int = 1) -> tuple[str, dict[str, Any]]:
    return "edit", {"seed": seed, "how": how}


REOPEN: tuple[str, dict[str, Any]] = ("reopen", {})
FREEZE: tuple[str, dict[str, Any]] = ("freeze", {"seed": 0})  # and unfreeze
STREAM = {"stream_gradients": True}

FOUND: dict[str, Sequence] = {
    "an empty bf16 parameter stops the second step": sequence(
        step(1), step(2), shapes=((40, 24), (4, 0), (0,)), dtype="bfloat16"
    ),
    "a write through .data just before a save is lost at resume": sequence(
        step(1), edit("data", seed=7), REOPEN, step(2), step(3)
    ),
    "that an edited weight is published at once is not saved": sequence(
        step(1), edit("in place"), step(2), REOPEN, step(3), step(4)
    ),
    "a save between a first streamed backward pass and its step cannot be loaded": sequence(
        step(1, between="save"), ("load", {"which": 0, "into": "new"}), step(2), config=STREAM
    ),
    "memory replaced before the first gradient is never trained": sequence(
        FREEZE, step(1), edit("memory"), FREEZE, step(2), step(3)
    ),
    "an edit between a first streamed backward pass and its step changes the schedule": sequence(
        step(1, between="edit"), step(2), step(3), config=STREAM
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    FOUND[name].run()
