"""Loops of plain PyTorch: what is around the optimizer may be anything, the training is AdamW's."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer, swa_utils
from torch.utils.checkpoint import checkpoint
from twins import (
    ATOL,
    OVERLAPPED,
    SYNCHRONOUS,
    TWINS,
    Shadow,
    check_shadow,
    check_streamed,
    check_twin,
    seeded,
)

import zenflow

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 1e-2
NUM_STEPS = 12


def make_model() -> nn.Module:
    """Without a bias before the normalization: its true gradient is 0, and Adam makes noise large."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30, bias=False),
        nn.BatchNorm1d(30),
        nn.Tanh(),
        nn.Linear(30, 24),
        nn.Linear(24, 20),
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = seeded(8, 20, seed=step)
    return (model(x) - x).float().square().mean()


def plain(model: nn.Module, optimizer: Optimizer, num_steps: int = NUM_STEPS) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Precision


def autocast_bf16(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def autocast_fp16(*, unscale: bool) -> Callable[[nn.Module, Optimizer], dict[str, Any]]:
    """fp16 with a scaler whose scale is too large at first, and again when it has grown."""

    def loop(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        calls: list[int] = []
        handle = optimizer.register_step_post_hook(lambda *_: calls.append(step))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
        scales = []
        for step in range(3 * NUM_STEPS):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = copy.deepcopy(list(model.parameters())), len(calls)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if len(calls) == before[1]:  # skipped by the scaler: nothing may change
                assert all(map(torch.equal, model.parameters(), before[0]))
        handle.remove()
        skipped = 3 * NUM_STEPS - len(calls)
        assert skipped > 3 and skipped > min(calls)  # at first and in the middle of windows
        return {"calls": calls, "scales": scales}

    return loop


def scaler_around_infinities(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Gradients that overflow at chosen steps of a window, whatever the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales = []
    for step in range(2 * NUM_STEPS):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step in (0, 4, 5, 6, 13):
            next(model.parameters()).grad[3, 4] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    if isinstance(optimizer, zenflow.ZenFlowAdamW):
        assert optimizer.stats.step == 2 * NUM_STEPS - 5
    assert scales[-1] == 2.0**3
    return scales


# Gradients


def zeroed_before_backward(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def zeroed_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    """With a gradient of zeros where AdamW keeps the tensor; each parameter is used in each step."""
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def zeroed_by_model(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step).backward()
        optimizer.step()


def assigned(model: nn.Module, optimizer: Optimizer) -> None:
    """Gradients from torch.autograd.grad, not from backward()."""
    params = list(model.parameters())
    for step in range(NUM_STEPS):
        for param, grad in zip(
            params, torch.autograd.grad(loss_of(model, step), params), strict=True
        ):
            param.grad = grad
        optimizer.step()


def twice_differentiated(model: nn.Module, optimizer: Optimizer) -> None:
    """A gradient penalty: gradients carry a graph of their own."""
    for step in range(NUM_STEPS):
        x = seeded(8, 20, seed=step).requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped(
    clip: Callable[..., Any], *arguments: Any, **options: Any
) -> Callable[..., list[float]]:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        norms = []
        for step in range(NUM_STEPS):
            (loss_of(model, step) * 100).backward()
            norms.append(float(clip(model.parameters(), *arguments, **options) or 0))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return loop


def clipped_by_group(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(NUM_STEPS):
        (loss_of(model, step) * 100).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model[0].parameters(), 0.1, norm)
        nn.utils.clip_grad_norm_(model[3].parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


# Which parameters train


def unfrozen_layer_by_layer(model: nn.Module, optimizer: Optimizer) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number == 4)
    for step in range(2 * NUM_STEPS):
        if step in (5, 11):
            model[{5: 3, 11: 0}[step]].requires_grad_(True)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_and_thawed(model: nn.Module, optimizer: Optimizer) -> None:
    """While frozen a parameter does not move: not by decay, nor by its moments."""
    for step in range(2 * NUM_STEPS):
        if step in (4, 9):
            model[3].requires_grad_(step == 9)
        if step == 4:
            if isinstance(optimizer, zenflow.ZenFlowAdamW):
                optimizer.synchronize()
            held = model[3].weight.detach().clone()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if 4 <= step < 9:
            assert torch.equal(model[3].weight, held)


def partly_used(model: nn.Module, optimizer: Optimizer) -> None:
    """Another set of layers in every step; the last one is never used."""
    for step in range(2 * NUM_STEPS):
        x = seeded(8, 20, seed=step)
        hidden = model[0](x) if step % 3 else seeded(8, 30, seed=step)
        out = hidden if step % 5 == 4 else model[3](hidden)
        loss = out.square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "plain": plain,
    "autocast bf16": autocast_bf16,
    "autocast fp16, scaler": autocast_fp16(unscale=False),
    "autocast fp16, scaler, unscaled and clipped": autocast_fp16(unscale=True),
    "scaler around infinities": scaler_around_infinities,
    "zeroed before backward": zeroed_before_backward,
    "zeroed in place": zeroed_in_place,
    "zeroed by model": zeroed_by_model,
    "autograd.grad": assigned,
    "gradient penalty": twice_differentiated,
    "clip_grad_norm_": clipped(nn.utils.clip_grad_norm_, 0.1),
    "clip_grad_norm_ foreach": clipped(nn.utils.clip_grad_norm_, 0.1, foreach=True),
    "clip_grad_norm_ inf": clipped(nn.utils.clip_grad_norm_, 0.1, norm_type=float("inf")),
    "clip_grad_value_": clipped(nn.utils.clip_grad_value_, 0.01),
    "clip_grad_value_ foreach": clipped(nn.utils.clip_grad_value_, 0.01, foreach=True),
    "clipped by group": clipped_by_group,
    "unfrozen layer by layer": unfrozen_layer_by_layer,
    "frozen and thawed": frozen_and_thawed,
    "partly used": partly_used,
}


@pytest.mark.covers(
    "plain loops",
    "autocast and GradScaler",
    "clipping",
    "parameters without a gradient",
    "a gradient that is not finite",
)
@pytest.mark.parametrize("config", TWINS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_as_with_adamw(loop: str, config: str) -> None:
    # A difference of one fp32 rounding grows where weights are then rounded to 16 bits.
    atol = 1e-4 if "autocast" in loop else ATOL
    check_twin(make_model, LOOPS[loop], TWINS[config], atol, lr=LR)


@pytest.mark.covers(
    "plain loops", "autocast and GradScaler", "clipping", "parameters without a gradient"
)
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_applies_each_gradient_once(loop: str, config: dict[str, Any]) -> None:
    check_shadow(make_model, LOOPS[loop], config, lr=LR)


STREAMABLE = (
    *("plain", "autocast bf16 without clipping", "zeroed before backward", "zeroed by model"),
    *("gradient penalty", "unfrozen layer by layer", "frozen and thawed", "partly used"),
)


def autocast_bf16_without_clipping(model: nn.Module, optimizer: Optimizer) -> list[float]:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, optimizer)


@pytest.mark.covers("streaming capture")
@pytest.mark.parametrize("loop", STREAMABLE)
def test_a_loop_with_streamed_gradients_has_the_same_bits(loop: str) -> None:
    check_streamed(make_model, LOOPS.get(loop, autocast_bf16_without_clipping), lr=LR)


@pytest.mark.covers("autocast and GradScaler")
@pytest.mark.parametrize("scale_of", [lambda s, o: s.unscale_(o), lambda s, o: s.step(o)])
def test_a_scaler_refuses_fp16_weights_as_with_adamw(scale_of: Callable[..., Any]) -> None:
    """It is torch's rule that a scaler's weights are fp32; nothing of ours changes the message."""
    messages = []
    for make in (zenflow.ZenFlowAdamW, torch.optim.AdamW):
        model = make_model().half()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(sum(p.float().sum() for p in model.parameters())).backward()
        with pytest.raises(ValueError, match="FP16") as raised:
            scale_of(scaler, optimizer)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# Evaluation


@pytest.mark.covers("pending steps", "plain loops")
@pytest.mark.parametrize("kernel", ["torch", None])
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED], ids=["synchronous", "overlapped"])
def test_what_inference_mode_drains_trains_on(
    config: dict[str, Any], kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors made in it must not be written outside of it; Lightning evaluates in it."""
    if kernel is not None:
        monkeypatch.setenv("ZENFLOW_KERNEL", kernel)

    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        assert isinstance(optimizer, zenflow.ZenFlowAdamW)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            if step % 3 == 0:
                with torch.inference_mode():
                    optimizer.synchronize()
            if step == 5:
                with torch.inference_mode():
                    optimizer.load_state_dict(optimizer.state_dict())

    check_shadow(make_model, loop, config, lr=LR)


# What wraps the model


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # without it, reentrant mode gives the first layer nothing
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.covers("activation checkpointing")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed(reentrant=reentrant)

    for config in TWINS.values():
        check_twin(make, plain, config, lr=LR)
    check_shadow(make, plain, lr=LR)
    check_streamed(make, plain, lr=LR)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.covers("torch.compile")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
        return torch.compile(model, backend=backend)

    with fresh_compiler():
        check_twin(make, plain, SYNCHRONOUS, lr=LR)
        check_shadow(make, plain, lr=LR)
        check_streamed(make, plain, lr=LR)


@pytest.mark.covers("torch.compile")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_training_step() -> None:
    """The whole of it, optimizer included."""

    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        @torch.compile(backend="eager")
        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        for step in range(NUM_STEPS):
            train_step(seeded(8, 20, seed=step))
            optimizer.zero_grad()

    with fresh_compiler():
        check_twin(make_model, loop, SYNCHRONOUS, atol=1e-5, lr=LR)


# Averages of weights


@pytest.mark.covers("weight averages")
@pytest.mark.parametrize("config", TWINS)
@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averaged_models(average: str, config: str) -> None:
    """AveragedModel, SWALR and update_bn; the average is current because the weights are."""

    def loop(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        ema = swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=average == "ema")
        schedule = swa_utils.SWALR(optimizer, swa_lr=5e-3, anneal_epochs=4)
        for step in range(NUM_STEPS):
            plain(model, optimizer, 2)
            schedule.step()
            if step >= 3 or average == "ema":
                averaged.update_parameters(model)
        swa_utils.update_bn([seeded(8, 20, seed=step) for step in range(4)], averaged)
        return dict(averaged.state_dict())

    check_twin(make_model, loop, TWINS[config], lr=LR)


def swap_weights(model: nn.Module, averaged: nn.Module) -> None:
    """As callbacks do for an evaluation: in place, under no_grad."""
    with torch.no_grad():
        for param, other in zip(model.parameters(), averaged.parameters(), strict=True):
            held = param.clone()
            param.copy_(other)
            other.copy_(held)


def evaluate_averages(model: nn.Module, optimizer: Optimizer) -> list[float]:
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    losses = []
    for step in range(4):
        plain(model, optimizer, 5)
        if isinstance(optimizer, zenflow.ZenFlowAdamW):
            optimizer.synchronize()
        ema.update_parameters(model)
        before = [param.detach().clone() for param in model.parameters()]
        swap_weights(model, ema.module)
        model.eval()
        losses.append(loss_of(model, 100 + step).item())
        model.train()
        swap_weights(model, ema.module)
        assert all(map(torch.equal, model.parameters(), before))
    return losses


@pytest.mark.covers("weight averages")
@pytest.mark.parametrize("config", TWINS)
def test_averages_swapped_in_for_an_evaluation_and_out_again(config: str) -> None:
    check_twin(make_model, evaluate_averages, TWINS[config], lr=LR)


@pytest.mark.covers("weight averages")
def test_averages_swapped_with_overlap() -> None:
    check_shadow(make_model, evaluate_averages, lr=LR)


@pytest.mark.covers("weight averages", "weights written by the user")
@pytest.mark.parametrize("config", TWINS)
def test_training_goes_on_from_swapped_in_averages(config: str) -> None:
    """Lookahead-like loops: the edited weights are the ones that train on."""

    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        for _ in range(4):
            plain(model, optimizer, 5)
            ema.update_parameters(model)
            with torch.no_grad():
                for param, other in zip(model.parameters(), ema.module.parameters(), strict=True):
                    param.copy_(other)

    check_twin(make_model, loop, TWINS[config], lr=LR)


# Schedules of transformers


def scheduler_arguments(name: str, optimizer: Optimizer) -> dict[str, Any]:
    """What a schedule needs beside the step counts."""
    specific = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 6},
        "reduce_lr_on_plateau": {"patience": 2, "factor": 0.5},
    }
    return {"scheduler_specific_kwargs": specific.get(name)}


def test_the_schedules_are_all_of_transformers() -> None:
    known = transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION
    assert {transformers.SchedulerType(kind) for kind in known} == set(transformers.SchedulerType)


@pytest.mark.covers("schedules of transformers", "learning rate schedules")
@pytest.mark.parametrize("name", [kind.value for kind in transformers.SchedulerType])
def test_every_schedule_of_transformers(name: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        schedule = transformers.get_scheduler(
            name, optimizer, 4, 2 * NUM_STEPS, **scheduler_arguments(name, optimizer)
        )
        rates = []
        for step in range(2 * NUM_STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step(*[1.0] if name in ("reduce_lr_on_plateau", "greedy") else [])
            optimizer.zero_grad()
        return rates

    check_twin(make_model, loop, SYNCHRONOUS, lr=LR)
    check_shadow(make_model, loop, lr=LR)


# The shadow itself


def test_the_shadow_sees_a_gradient_that_is_lost() -> None:
    """Or the checks above would prove nothing."""
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=LR, config=OVERLAPPED)
    shadow = Shadow(optimizer)
    plain(model, optimizer, 5)
    shadow.assert_equal()
    loss_of(model, 5).backward()
    shadow._before_step()
    with pytest.raises(AssertionError):
        shadow.assert_equal()
    optimizer.close()
