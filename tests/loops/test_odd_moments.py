"""Loops that do something unusual between a backward pass and its step, with both kinds of capture.

A loop is given a function that makes optimizers, so that it may have several. Each has to train exactly as
with AdamW, whether gradients are read in ``step()`` or streamed.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from twins import ATOL, SYNCHRONOUS, seeded

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 1e-2
NUM_STEPS = 10
Make = Callable[[Iterable[Tensor]], Optimizer]
Loop = Callable[[nn.Sequential, Make], None]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 24), nn.Linear(24, 20)
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = seeded(8, 20, seed=step)
    return (model(x) - x).square().mean()


def head_loss(model: nn.Sequential, step: int) -> Tensor:
    """Of the last layer alone."""
    return model[4](seeded(4, 24, seed=step)).square().mean()


def accumulating(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    return getattr(optimizer, "accumulate", contextlib.nullcontext)()


def end_step(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class StopIt(Exception):
    pass


# What a backward pass leaves, and what happens before its step


def frozen_before_its_step(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        model[3].requires_grad_(step != 5)
        loss_of(model, step).backward()
        if step == 4:
            model[3].requires_grad_(False)
        end_step(optimizer)


def gradients_replaced(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        for param in model.parameters() if step % 2 else ():
            param.grad = torch.ones_like(param)
        end_step(optimizer)


def one_gradient_dropped(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        model[3].weight.grad = None
        end_step(optimizer)


def gradients_scaled(model: nn.Sequential, make: Make) -> None:
    """By numbers and tensors, as loss weighting does."""
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        for param in model.parameters():
            param.grad.mul_(-0.25)
            param.grad *= torch.tensor([2.0 + step])
        end_step(optimizer)


def zeroed_while_frozen(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        if step == 3:
            loss_of(model, 100).backward()
            model.requires_grad_(False)
            optimizer.zero_grad()
            model.requires_grad_(True)
        loss_of(model, step).backward()
        end_step(optimizer)


def graph_of_gradients(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward(create_graph=True)
        end_step(optimizer)


def two_roots(model: nn.Sequential, make: Make) -> None:
    """One backward pass of two losses adds to each gradient before it is complete."""
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        torch.autograd.backward([loss_of(model, step), loss_of(model, 50 + step)])
        end_step(optimizer)


def in_a_thread(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())

    def run(work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    for step in range(NUM_STEPS):
        run(lambda step=step: loss_of(model, step).backward())
        run(optimizer.step)
        optimizer.zero_grad()


# Accumulation


def all_of_it_accumulated(model: nn.Sequential, make: Make) -> None:
    """The last backward pass, too."""
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        for part in (0, 50):
            with accumulating(optimizer):
                loss_of(model, part + step).backward()
        end_step(optimizer)


def last_pass_of_one_layer(model: nn.Sequential, make: Make) -> None:
    """What others have accumulated stays where it is, and both are clipped together."""
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        with accumulating(optimizer):
            (loss_of(model, step) * 100).backward()
        head_loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        end_step(optimizer)


def same_graph_twice(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        with accumulating(optimizer):
            loss.backward(retain_graph=True)
        loss.backward()
        end_step(optimizer)


def raised_while_accumulating(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        with contextlib.suppress(StopIt), accumulating(optimizer):
            loss_of(model, step).backward()
            if step == 4:
                raise StopIt
        loss_of(model, 50 + step).backward()
        end_step(optimizer)


# Exceptions


def raised_in_a_hook(model: nn.Sequential, make: Make) -> None:
    """A backward pass ends in its middle. What it has left is dropped, or (step 5) applied."""
    optimizer = make(model.parameters())
    step = 0

    def raising(_: Tensor) -> None:
        if step in (0, 4, 5):
            raise StopIt

    model[3].weight.register_post_accumulate_grad_hook(raising)
    for step in range(NUM_STEPS):
        try:
            loss_of(model, step).backward()
        except StopIt:
            if step != 5:
                optimizer.zero_grad()
                continue
        end_step(optimizer)


def raised_in_a_closure(model: nn.Sequential, make: Make) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            if step in (0, 3, 4):
                raise StopIt
            return loss.item()

        with contextlib.suppress(StopIt):
            optimizer.step(closure)


def refused_and_recovered(model: nn.Sequential, make: Make) -> None:
    """Two backward passes that nobody has announced, then a new start."""
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        if step in (0, 3):
            with contextlib.suppress(RuntimeError):
                loss_of(model, step).backward()
            optimizer.zero_grad()
            loss_of(model, step).backward()
        end_step(optimizer)


# Several optimizers


def halves(model: nn.Sequential, make: Make) -> None:
    """Each has its own gradients; one steps in every second iteration and drops the others."""
    optimizers = make(model[:3].parameters()), make(model[3:].parameters())
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_half_accumulates(model: nn.Sequential, make: Make) -> None:
    always, seldom = make(model[:3].parameters()), make(model[3:].parameters())
    for step in range(NUM_STEPS):
        with contextlib.nullcontext() if step % 2 else accumulating(seldom):
            loss_of(model, step).backward()
        end_step(always)
        if step % 2:
            end_step(seldom)


def adversaries(model: nn.Sequential, make: Make) -> None:
    """The second one's backward pass reaches the first one's weights, which drop it."""
    maker, judge = model[:3], model[3:]
    of_maker, of_judge = make(maker.parameters()), make(judge.parameters())
    for step in range(NUM_STEPS):
        x = seeded(8, 20, seed=step)
        of_judge.zero_grad()
        judge(maker(x).detach()).square().mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(maker(x)).mean().backward()
        of_maker.step()


def step_in_backward(model: nn.Sequential, make: Make) -> None:
    """One optimizer for each parameter, stepping as soon as its gradient is there."""
    optimizers = {param: make([param]) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda each: end_step(optimizers[each]))
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()


LOOPS: tuple[Loop, ...] = (
    *(frozen_before_its_step, gradients_replaced, one_gradient_dropped, gradients_scaled),
    *(zeroed_while_frozen, graph_of_gradients, two_roots, in_a_thread, all_of_it_accumulated),
    *(last_pass_of_one_layer, same_graph_twice, raised_while_accumulating, raised_in_a_hook),
    *(raised_in_a_closure, refused_and_recovered, halves, one_half_accumulates, adversaries),
    step_in_backward,
)


def train(loop: Loop, config: dict[str, Any] | None) -> nn.Sequential:
    """With AdamW if there is no config."""
    model, made = make_model(), []

    def make(params: Iterable[Tensor]) -> Optimizer:
        if config is None:
            return torch.optim.AdamW(params, lr=LR)
        made.append(zenflow.ZenFlowAdamW(params, lr=LR, config=config))
        return made[-1]

    loop(model, make)
    for optimizer in made:
        optimizer.close()
    return model


@pytest.mark.covers("plain loops", "streaming capture", "several backward passes")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("stream", [False, True], ids=["at step", "streamed"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_trains_as_with_adamw(loop: Loop, stream: bool) -> None:
    ours = train(loop, SYNCHRONOUS | {"stream_gradients": stream})
    expected = train(loop, None)
    moved = [
        not torch.equal(*pair)
        for pair in zip(expected.parameters(), make_model().parameters(), strict=True)
    ]
    assert any(moved)
    for param, other in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=ATOL)


@pytest.mark.covers("activation checkpointing", "streaming capture")
def test_a_layer_checkpointed_twice_streams_or_is_refused_with_the_remedy() -> None:
    """Reentrant checkpointing completes such a layer's gradient in two backward passes."""

    def loop(model: nn.Sequential, make: Make, *, reentrant: bool) -> None:
        layer = nn.Sequential(model[0], model[3], nn.Linear(24, 20))
        optimizer = make(layer.parameters())
        for step in range(NUM_STEPS):
            x = seeded(8, 20, seed=step).requires_grad_()
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.square().mean().backward()
            end_step(optimizer)

    for stream in (False, True):
        config = SYNCHRONOUS | {"stream_gradients": stream}
        for reentrant in (False, True):

            def each(model: nn.Sequential, make: Make, reentrant: bool = reentrant) -> None:
                loop(model, make, reentrant=reentrant)

            if stream and reentrant:
                with pytest.raises(RuntimeError, match="use_reentrant=False"):
                    train(each, config)
                continue
            ours, expected = train(each, config), train(each, None)
            for param, other in zip(ours.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(param, other, rtol=0, atol=ATOL)
