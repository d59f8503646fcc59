"""Streaming capture: gradients leave during the backward pass; nothing else may differ."""

import copy
import gc
import os
import pickle
import signal
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from zenflow.runtime.pipeline import HostPipeline

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 14


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 70), nn.LayerNorm(70), nn.Tanh(), nn.Linear(70, 50), nn.Linear(50, 40)
    ).to(dtype)


def backward(model: nn.Module, step: int, parts: int = 1) -> list[Tensor]:
    """Losses of the step's micro-batches, before their backward pass."""
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
    x = x.to(next(model.parameters()).dtype)
    return [(model(part) - part).square().sum() / x.numel() for part in x.chunk(parts)]


def train(config: dict[str, Any], dtype: torch.dtype, parts: int = 1) -> list[list[Tensor]]:
    model = make_model(dtype)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    seen = []
    for step in range(NUM_STEPS):
        *first, last = backward(model, step, parts)
        for loss in first:
            with optimizer.accumulate():
                loss.backward()
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(copy.deepcopy(list(model.parameters())))
    optimizer.close()
    seen.append(copy.deepcopy(list(model.parameters())))
    return seen


def assert_equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    for step, (params, others) in enumerate(zip(one, other, strict=True)):
        for param, expected in zip(params, others, strict=True):
            assert torch.equal(param, expected), step


@pytest.mark.covers("streaming capture")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("select_interval", [1, 3, "auto"])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_equals_capture_at_step(
    dtype: torch.dtype,
    select_interval: Any,
    interval: int,
    overlap: bool,
    max_grad_norm: float | None,
) -> None:
    config = {
        "preview": False,
        "update_interval": interval,
        "select_interval": select_interval,
        "overlap_step": overlap,
        "max_grad_norm": max_grad_norm,
        "topk_ratio": 0.2,
    }
    assert_equal(train(config | {"stream_gradients": True}, dtype), train(config, dtype))


@pytest.mark.covers("several backward passes", "streaming capture")
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulates_like_capture_at_step(parts: int) -> None:
    config = {"update_interval": 3, "topk_ratio": 0.1, "preview": False}
    streamed = train(config | {"stream_gradients": True}, torch.float32, parts)
    assert_equal(streamed, train(config, torch.float32, parts))


@pytest.mark.covers("clipping", "streaming capture")
@pytest.mark.parametrize("streaming", [True, False])
def test_clips_as_torch_does(streaming: bool) -> None:
    model, reference = make_model(), make_model()
    config = {"overlap_step": False, "update_interval": 1, "topk_ratio": 0.1}
    config |= {"max_grad_norm": 0.05, "stream_gradients": streaming}
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        backward(model, step)[0].backward()
        ours.step()
        backward(reference, step)[0].backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        assert norm > 0.05
        plain.step()
        plain.zero_grad()
    ours.close()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_foreign_clip_grad_norm_is_honoured(foreach: bool | None, interval: int) -> None:
    """Twice in a step, too, where the second is rounded once less; the norm is the one it returns."""
    results = []
    for streaming in (False, True):
        model = make_model()
        config = {
            "update_interval": interval,
            "topk_ratio": 0.1,
            "stream_gradients": streaming,
            "preview": False,
        }
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
        norms = []
        for step in range(NUM_STEPS):
            backward(model, step)[0].backward()
            for bound in (0.05, 0.02) if step % 3 == 0 else (float("inf"), 0.05):
                clip = nn.utils.clip_grad_norm_
                norms.append(
                    clip(model.parameters(), bound, foreach=foreach if not streaming else None)
                )
            optimizer.step()
        optimizer.close()
        results.append((norms, list(model.parameters())))
    (norms, params), (streamed_norms, streamed_params) = results
    torch.testing.assert_close(torch.stack(streamed_norms), torch.stack(norms), rtol=1e-5, atol=0)
    for param, other in zip(params, streamed_params, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-6)


def streaming_optimizer(model: nn.Module, **config: Any) -> zenflow.ZenFlowAdamW:
    settings = {"update_interval": 2, "stream_gradients": True} | config
    return zenflow.ZenFlowAdamW(model.named_parameters(), lr=1e-2, config=settings)


@pytest.mark.covers("clipping", "streaming capture")
@pytest.mark.parametrize("bound", [0.05, 0.5])
def test_the_configs_bound_is_of_what_others_have_clipped(bound: float) -> None:
    """Both may clip: a trainer that clips by default, and ``max_grad_norm``."""
    results = []
    for streaming in (False, True):
        model = make_model()
        config = {
            "update_interval": 2,
            "max_grad_norm": bound,
            "stream_gradients": streaming,
            "preview": False,
        }
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
        for step in range(NUM_STEPS):
            backward(model, step)[0].backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            optimizer.step()
        optimizer.close()
        results.append(list(model.parameters()))
    for param, other in zip(*results, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-6)


@pytest.mark.covers("a gradient that is not finite", "streaming capture")
@pytest.mark.parametrize("factor", [float("inf"), torch.tensor(float("nan"))])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_factor_that_is_not_finite_skips_the_step_whole(streaming: bool, factor: Any) -> None:
    model = make_model()
    optimizer = streaming_optimizer(model, stream_gradients=streaming)
    before = copy.deepcopy(list(model.parameters()))
    backward(model, 0)[0].backward()
    model[3].weight.grad.mul_(factor)
    optimizer.step()
    assert optimizer.stats.skipped
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.close()


USES = {
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "read": lambda model: model[0].weight.grad.sum().item(),
    "other norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0),
    "second backward": lambda model: backward(model, 1)[0].backward(),
    "zero in place": lambda model: model[0].weight.grad.zero_(),
}


@pytest.mark.covers("clipping", "streaming capture")
@pytest.mark.parametrize("use", USES)
def test_a_use_that_cannot_be_honoured_names_the_remedy(use: str) -> None:
    model = make_model()
    optimizer = streaming_optimizer(model)
    backward(model, 0)[0].backward()
    with pytest.raises(RuntimeError, match=r"max_grad_norm.*optimizer\.accumulate"):
        USES[use](model)
    optimizer.close()


@pytest.mark.covers("a gradient that is not finite", "streaming capture")
def test_a_gradient_that_is_not_finite_skips_the_step_whole() -> None:
    """Also in the first step, which has begun states, and where channels were due for scoring."""
    for bad_step in (0, 3, 4):
        model, reference = make_model(), make_model()
        config = {"select_interval": 1, "topk_ratio": 0.1, "preview": False}
        ours, expected = (streaming_optimizer(m, **config) for m in (model, reference))
        for step in range(9):
            if step == bad_step:
                before = copy.deepcopy(list(model.parameters()))
                (backward(model, 77)[0] * float("inf")).backward()
                ours.step()
                assert ours.stats.skipped
                assert all(map(torch.equal, model.parameters(), before))
            for each, optimizer in ((model, ours), (reference, expected)):
                backward(each, step)[0].backward()
                optimizer.step()
            assert not ours.stats.skipped
            assert_equal([list(model.parameters())], [list(reference.parameters())])
        ours.close()
        expected.close()


@pytest.mark.parametrize("drop", ["optimizer", "model"])
def test_zeroed_gradients_are_dropped(drop: str) -> None:
    model, reference = make_model(), make_model()
    ours, expected = streaming_optimizer(model), streaming_optimizer(reference)
    for step in range(6):
        backward(model, 50 + step)[0].backward()
        (ours if drop == "optimizer" else model).zero_grad()
        for each, optimizer in ((model, ours), (reference, expected)):
            backward(each, step)[0].backward()
            optimizer.step()
        assert_equal([list(model.parameters())], [list(reference.parameters())])
    ours.close()
    expected.close()


def test_parameters_unfrozen_later_are_streamed_too() -> None:
    model = make_model()
    model[3].requires_grad_(False)
    optimizer = streaming_optimizer(model)
    backward(model, 0)[0].backward()
    optimizer.step()
    model[3].requires_grad_(True)
    for step in range(1, 4):
        backward(model, step)[0].backward()
        optimizer.step()
    assert optimizer.state_dict()["state"][4]["step"] == 3
    backward(model, 9)[0].backward()
    assert type(model[3].weight.grad).__name__ == "TakenGradient"
    optimizer.close()


def test_the_optimizer_is_still_collected() -> None:
    model = make_model()
    optimizer = streaming_optimizer(model)
    backward(model, 0)[0].backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model, 1)[0].backward()
    assert isinstance(model[0].weight.grad, Tensor)


def num_hooks(model: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


@pytest.mark.covers("streaming capture")
@pytest.mark.parametrize("end", ["closed", "collected"])
@pytest.mark.parametrize("stepped", [True, False])
def test_nothing_of_it_is_left_on_the_model(end: str, stepped: bool) -> None:
    """The next optimizer, of whichever kind, finds plain parameters."""
    model = make_model()
    for _ in range(3):
        optimizer = streaming_optimizer(model)
        backward(model, 0)[0].backward()
        if stepped:
            optimizer.step()
        if end == "closed":
            optimizer.close()
        del optimizer
        gc.collect()
        assert num_hooks(model) == 0
        assert all(param.grad is None for param in model.parameters())
    plain = torch.optim.AdamW(model.parameters())
    backward(model, 0)[0].backward()
    plain.step()


@pytest.mark.covers("several optimizers", "streaming capture")
def test_the_optimizer_built_last_streams_and_the_other_is_told() -> None:
    """As when a trainer trains again and still holds its first optimizer."""
    model = make_model()
    first = streaming_optimizer(model)
    backward(model, 0)[0].backward()
    second = streaming_optimizer(model)
    assert num_hooks(model) == len(list(model.parameters()))
    backward(model, 1)[0].backward()
    with pytest.raises(RuntimeError, match="built later streams gradients of this one's param"):
        first.step()
    second.step()
    assert (first.stats.step, second.stats.step) == (0, 1)
    first.close()
    backward(model, 2)[0].backward()
    second.step()
    assert second.stats.step == 2
    second.close()


@pytest.mark.covers("a gradient that is not finite", "streaming capture")
def test_a_factor_that_makes_a_gradient_overflow_skips_the_step_whole() -> None:
    """Each of the two is finite, and so is what the norm would be without it."""
    model = make_model()
    optimizer = streaming_optimizer(model)
    before = copy.deepcopy(list(model.parameters()))
    backward(model, 0)[0].backward()
    model[3].weight.grad.mul_(1e30).mul_(1e30)
    optimizer.step()
    assert optimizer.stats.skipped
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizer.close()


@pytest.mark.covers("ends with its process", "streaming capture")
def test_ctrl_c_waits_until_a_gradient_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught, zeroed and trained on, as in a notebook: like a run without that backward pass."""
    capture, count = HostPipeline.capture, 0

    def interrupting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count % 2 == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return capture(*arguments)

    results = []
    for interrupted in (False, True):
        model = make_model()
        optimizer = streaming_optimizer(model, topk_ratio=0.2)
        for step in range(NUM_STEPS):
            if interrupted and step in (0, 4):
                monkeypatch.setattr(HostPipeline, "capture", interrupting)
                with pytest.raises(KeyboardInterrupt):
                    backward(model, 50)[0].backward()
                monkeypatch.undo()
                optimizer.zero_grad()
            backward(model, step)[0].backward()
            optimizer.step()
        optimizer.close()
        results.append([list(model.parameters())])
    assert_equal(*results)


@pytest.mark.covers("streaming capture")
def test_gradients_of_another_dtype_than_the_weights() -> None:
    results = []
    for streaming in (False, True):
        model = make_model(torch.bfloat16)
        optimizer = streaming_optimizer(model, stream_gradients=streaming, preview=False)
        for param in model.parameters():
            param.grad_dtype = torch.float32
        for step in range(NUM_STEPS):
            backward(model, step)[0].backward()
            assert all(param.grad.dtype == torch.float32 for param in model.parameters())
            optimizer.step()
        optimizer.close()
        results.append([list(model.parameters())])
    assert_equal(*results)


@pytest.mark.covers("pending steps")
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copy_of_the_given_model_is_its_own(how: str) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4}, model=model)
    for step in range(3):
        backward(model, step)[0].backward()
        optimizer.step()
    lag = optimizer.stats.staleness_steps
    other = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    other.eval()
    other(torch.zeros(1, 40))
    other.state_dict()
    assert optimizer.stats.staleness_steps == lag > 0
    model.state_dict()
    assert optimizer.stats.staleness_steps == 0
    optimizer.close()


@pytest.mark.covers("pending steps")
def test_saved_and_evaluated_weights_are_current() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(
        model.parameters(), lr=1e-2, config={"update_interval": 4}, model=model
    )
    for step in range(6):
        backward(model, step)[0].backward()
        optimizer.step()
    assert optimizer.stats.staleness_steps > 0
    saved = copy.deepcopy(model.state_dict())
    assert optimizer.stats.staleness_steps == 0
    for number, param in enumerate(saved.values()):
        tensors = optimizer.state_dict()["state"][number]
        if "master" in tensors:
            assert torch.equal(tensors["master"], param)
    backward(model, 9)[0].backward()
    optimizer.step()
    model.eval()
    model(torch.zeros(1, 40))
    assert optimizer.stats.staleness_steps == 0
    optimizer.close()


@pytest.mark.parametrize("topk_ratio", [0.1, 1])
def test_a_state_is_moved_in_while_a_backward_pass_runs(topk_ratio: float) -> None:
    """A loaded state is moved in with the first gradient; autograd must still find its saved weights."""

    def train(*, resumes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 8))
        config = {"topk_ratio": topk_ratio, "update_interval": 2, "stream_gradients": True}
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
        for step in range(6):
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if resumes and step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    whole, resumed = train(resumes=False), train(resumes=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
