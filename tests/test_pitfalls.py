"""What goes wrong for users of offloaded optimizers elsewhere, each as a case here.

The right values are those of plain AdamW, given the same gradients: in synchronous mode after every step,
with overlap after ``synchronize()``. Cases that have a file of their own are marked there;
docs/compatibility.md lists all.
"""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

SYNCHRONOUS = {"overlap_step": False, "update_interval": 1, "topk_ratio": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "synchronous": SYNCHRONOUS,
    "overlapped": {"update_interval": 3, "topk_ratio": 0.1},
    "defaults": {},
}
Grads = Sequence[Tensor | None]


def draw(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers) for shape in shapes]


def give(params: Sequence[Tensor], grads: Grads) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def assert_as_adamw(
    shapes: Sequence[tuple[int, ...]],
    steps: Iterator[Grads],
    config: dict[str, Any],
    arrange: Callable[[Tensor], Tensor] = torch.clone,
) -> None:
    """The same gradients through both; equal after each step, or at the end if overlapped."""
    ours = [nn.Parameter(arrange(weight)) for weight in draw(shapes, 0)]
    plain = [nn.Parameter(weight) for weight in draw(shapes, 0)]
    optimizer = zenflow.ZenFlowAdamW(ours, lr=1e-2, config=config)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    for grads in steps:
        for params, each in ((ours, optimizer), (plain, reference)):
            give(params, grads)
            each.step()
            each.zero_grad()
        if config is SYNCHRONOUS:
            assert_close(ours, plain)
    optimizer.close()
    assert_close(ours, plain)


def assert_close(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    for param, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=2e-6)


# Which parameters have a gradient

MATRICES = ((20, 30), (30,), (16, 20), (24, 20))


def unused(step: int, number: int) -> bool:
    return number == 0


def alternately_used(step: int, number: int) -> bool:
    return (step + number) % 2 == 0


def first_in_step_3(step: int, number: int) -> bool:
    return step < 3 and number == 2


def not_after_step_3(step: int, number: int) -> bool:
    return step > 3 and number in (1, 2)


def all_but_one(step: int, number: int) -> bool:
    return number != step % 4


@pytest.mark.covers("parameters without a gradient")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "missing", [unused, alternately_used, first_in_step_3, not_after_step_3, all_but_one]
)
def test_parameters_without_a_gradient(missing: Callable[[int, int], bool], config: str) -> None:
    def steps() -> Iterator[Grads]:
        for step in range(10):
            grads = draw(MATRICES, 100 + step)
            yield [None if missing(step, number) else grad for number, grad in enumerate(grads)]

    assert_as_adamw(MATRICES, steps(), CONFIGS[config])


@pytest.mark.covers("parameters without a gradient")
def test_frozen_and_unfrozen_later() -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(*(nn.Linear(20, 20) for _ in range(3))) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=SYNCHRONOUS)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(12):
        for each, optimizer in ((model, ours), (reference, plain)):
            each[0].requires_grad_(step >= 4)
            each[2].requires_grad_(step < 8)
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            (each(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours.close()
    assert_close(list(model.parameters()), list(reference.parameters()))


# Shapes

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (48, 32),
    "odd matrix": (37, 19),
    "one row": (1, 129),
    "one column": (129, 1),
    "convolution": (16, 12, 3, 3),
    "three-dimensional convolution": (4, 6, 3, 3, 3),
    "experts in one tensor": (4, 24, 18),
    "vector": (70,),
    "scalar": (),
    "empty": (0, 7),
    "no channel": (7, 0),
}


@pytest.mark.covers("shapes")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape: tuple[int, ...], config: str) -> None:
    """Each beside a matrix, which it must not disturb."""
    shapes = ((24, 40), shape)
    assert_as_adamw(shapes, (draw(shapes, 200 + step) for step in range(8)), CONFIGS[config])


@pytest.mark.covers("shapes")
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_that_are_not_contiguous(config: str) -> None:
    def transposed(weight: Tensor) -> Tensor:
        return weight.transpose(0, 1).contiguous().transpose(0, 1)

    shapes = ((24, 40), (6, 12, 3, 3))
    steps = (draw(shapes, 300 + step) for step in range(8))
    assert_as_adamw(shapes, steps, CONFIGS[config], transposed)


# Gradients that add up


@pytest.mark.covers("several backward passes")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_backwards", [1, 2, 5, 8])
def test_several_backward_passes(num_backwards: int, streaming: bool) -> None:
    """As many micro-batches as wanted equal the whole batch at once, in both ways of capture."""
    torch.manual_seed(0)
    model, reference = nn.Linear(30, 20), nn.Linear(30, 20)
    reference.load_state_dict(model.state_dict())
    config = SYNCHRONOUS | {"stream_gradients": streaming}
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(6):
        x = torch.randn(40, 30, generator=torch.Generator().manual_seed(step))
        *first, last = x.chunk(num_backwards)
        with ours.accumulate():
            for part in first:
                (model(part) - 1).square().sum().backward()
        (model(last) - 1).square().sum().backward()
        ours.step()
        (reference(x) - 1).square().sum().backward()
        plain.step()
        plain.zero_grad()
    ours.close()
    assert_close(list(model.parameters()), list(reference.parameters()))


# Groups, selection


@pytest.mark.covers("hyperparameters of each group")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "changed",
    [{"lr": 1e-3}, {"weight_decay": 0.5}, {"betas": (0.5, 0.8)}, {"eps": 1e-2}],
    ids=lambda changed: next(iter(changed)),
)
def test_hyperparameters_of_each_group(changed: dict[str, Any], config: str) -> None:
    """Given at construction, and changed again in the middle of a window."""
    ours, plain = ([nn.Parameter(w) for w in draw(MATRICES, 0)] for _ in range(2))
    optimizers = [
        make([{"params": params[:2]}, {"params": params[2:]} | changed], lr=1e-2)
        for make, params in (
            (lambda groups, lr: zenflow.ZenFlowAdamW(groups, lr=lr, config=CONFIGS[config]), ours),
            (torch.optim.AdamW, plain),
        )
    ]
    for step in range(10):
        for optimizer, params in zip(optimizers, (ours, plain), strict=True):
            if step == 5:
                optimizer.param_groups[0].update(changed)
            give(params, draw(MATRICES, 400 + step))
            optimizer.step()
    optimizers[0].close()
    assert_close(ours, plain)


@pytest.mark.covers("biases before weights")
@pytest.mark.parametrize("biases_first", [False, True])
def test_the_channels_with_the_largest_gradients_are_selected(biases_first: bool) -> None:
    shapes = [(30, 40), (20, 50), (30,), (20,)]
    if biases_first:
        shapes.reverse()
    params = [nn.Parameter(weight) for weight in draw(shapes, 0)]
    optimizer = zenflow.ZenFlowAdamW(params, config={"topk_ratio": 0.2, "update_interval": 1})
    grads = draw(shapes, 1)
    give(params, grads)
    optimizer.step()
    saved = optimizer.state_dict()["zenflow"]["weights"]
    for number, grad in enumerate(grads):
        if grad.dim() < 2:
            assert number not in saved
            continue
        best = grad.square().sum(0).topk(grad.shape[1] // 5).indices.sort().values
        (segment,) = saved[number]["segments"]
        assert torch.equal(segment["selected"], best)
    optimizer.close()


# State in 16 bits


@pytest.mark.covers("16-bit state")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_and_step_count_are_not_16_bit(dtype: torch.dtype) -> None:
    params = [nn.Parameter(weight.to(dtype)) for weight in draw(((16, 20), (20,)), 0)]
    optimizer = zenflow.ZenFlowAdamW(params, config={"update_interval": 4})
    for _ in range(300):
        give(params, [torch.ones_like(param) for param in params])
        optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert state["step"] == 300
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert state[name].dtype == torch.float32
    optimizer.close()


# Saving


@pytest.mark.covers("the optimizer's state as plain AdamW has it")
def test_a_state_is_tensors_and_numbers_and_little_more_than_its_bytes() -> None:
    params = [nn.Parameter(weight) for weight in draw(((600, 400), (400,)), 0)]
    optimizer = zenflow.ZenFlowAdamW(params, config={"update_interval": 2})
    for step in range(4):
        give(params, draw(((600, 400), (400,)), step))
        optimizer.step()
    optimizer.synchronize()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    optimizer.close()
    state_bytes = 12 * 600 * 400 + 8 * 400
    assert file.tell() < 1.02 * state_bytes
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    plain = torch.optim.AdamW([nn.Parameter(param.detach().clone()) for param in params])
    plain.load_state_dict(loaded)


TRAIN_AND_SAVE = """
import os, sys, torch, zenflow
sys.path.insert(0, sys.argv[1])
from test_pitfalls import killed_run
optimizer, params, train = killed_run()
for step in range(10**6):
    train(step)
    file = f"{sys.argv[2]}/{step}.part"
    weights = [param.detach() for param in params]
    torch.save([step, weights, optimizer.state_dict()], file)
    os.replace(file, f"{sys.argv[2]}/saved.pt")
"""


def killed_run() -> tuple[zenflow.ZenFlowAdamW, list[nn.Parameter], Callable[[int], None]]:
    """What both processes train."""
    torch.set_num_threads(1)
    params = [nn.Parameter(weight) for weight in draw(MATRICES, 0)]
    optimizer = zenflow.ZenFlowAdamW(params, lr=1e-2, config={"update_interval": 4})

    def train(step: int) -> None:
        give(params, draw(MATRICES, 500 + step))
        optimizer.step()

    return optimizer, params, train


@pytest.mark.covers("resume")
def test_resume_after_a_kill(tmp_path: Path) -> None:
    """Killed at a random moment, it goes on from its last whole save as if nothing had been."""
    arguments = [sys.executable, "-c", TRAIN_AND_SAVE, str(Path(__file__).parent), str(tmp_path)]
    child = subprocess.Popen(arguments)
    until = time.monotonic() + 120
    while not (tmp_path / "saved.pt").exists() and child.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    step, weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed, params, train_on = killed_run()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    resumed.load_state_dict(state)
    optimizer, expected, train = killed_run()
    for number in range(step + 6):
        train(number)
        if number > step:
            train_on(number)
    assert all(map(torch.equal, params, expected))
    resumed.close()
    optimizer.close()


# Defaults


@pytest.mark.covers("the update interval and accumulation")
@pytest.mark.parametrize("config", [None, {}, zenflow.ZenFlowConfig()], ids=repr)
def test_the_documented_defaults_train(config: Any) -> None:
    """And every gradient is applied once, whatever interval "auto" has chosen."""
    params, plain = ([nn.Parameter(w) for w in draw(MATRICES, 0)] for _ in range(2))
    optimizer = zenflow.ZenFlowAdamW(params, lr=1e-2, config=config)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    for step in range(20):
        for each, tensors in ((optimizer, params), (reference, plain)):
            give(tensors, draw(MATRICES, 600 + step))
            each.step()
        assert 1 <= optimizer.stats.update_interval <= optimizer.config.max_update_interval
    assert optimizer.stats.step == 20
    optimizer.close()
    assert_close(params, plain)


@pytest.mark.covers("the update interval and accumulation")
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_interval_and_accumulation_do_not_meet(interval: int, accumulation: int) -> None:
    """Each ``step()`` is one AdamW step, however many backward passes are before it."""
    (weight,) = draw(((20, 30),), 0)
    param, plain = nn.Parameter(weight.clone()), nn.Parameter(weight)
    config = {"update_interval": interval, "topk_ratio": 0.1}
    optimizer = zenflow.ZenFlowAdamW([param], lr=1e-2, config=config)
    reference = torch.optim.AdamW([plain], lr=1e-2)
    for number in range(12 * accumulation):
        (factor,) = draw(((20, 30),), 700 + number)
        (param * factor).sum().backward()
        (plain * factor).sum().backward()
        if (number + 1) % accumulation == 0:
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
    assert optimizer.stats.step == 12
    optimizer.close()
    assert_close([param], [plain])
