"""What a user of torch.optim expects of any optimizer, and what goes wrong by name."""

import contextlib
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from zenflow.runtime.pipeline import HostWorkError
from zenflow.runtime.platform import Platform
from zenflow.runtime.segment import Segment

pytestmark = pytest.mark.usefixtures("one_thread")

SYNCHRONOUS = {"overlap_step": False, "update_interval": 1, "select_interval": 3}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))


def batch(step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = batch(step)
    return (model(x) - x).square().mean()


def twin(
    config: dict[str, Any] | None = None, **hyper: Any
) -> tuple[nn.Module, zenflow.ZenFlowAdamW, nn.Module, torch.optim.AdamW]:
    model, reference = make_model(), make_model()
    ours = zenflow.ZenFlowAdamW(model.parameters(), config=config or SYNCHRONOUS, **hyper)
    return model, ours, reference, torch.optim.AdamW(reference.parameters(), **hyper)


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)


# The contract of torch.optim.Optimizer


def test_it_is_an_optimizer_and_takes_the_gradients() -> None:
    model, optimizer, *_ = twin()
    assert isinstance(optimizer, torch.optim.Optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    optimizer.close()


@pytest.mark.covers("closures")
def test_a_closure_is_evaluated_with_gradients_on() -> None:
    model, ours, reference, plain = twin(lr=1e-2)
    for step in range(5):
        for each, optimizer in ((model, ours), (reference, plain)):

            def closure(each: nn.Module = each, step: int = step) -> Tensor:
                each.zero_grad()
                loss = loss_of(each, step)
                loss.backward()
                return loss

            returned = optimizer.step(closure)
            assert returned is not None
            assert returned.requires_grad
    assert_close(model, reference)
    ours.close()


@pytest.mark.covers("several backward passes")
@pytest.mark.parametrize("num_backwards", [1, 2, 5, 8])
def test_several_backward_passes_add_up(num_backwards: int) -> None:
    model, ours, reference, plain = twin(lr=1e-2)
    for step in range(6):
        for part in range(num_backwards):
            (loss_of(model, 10 * step + part) / num_backwards).backward()
        ours.step()
        total = sum(loss_of(reference, 10 * step + part) for part in range(num_backwards))
        (total / num_backwards).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)
    ours.close()


def clip_by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@pytest.mark.covers("clipping")
@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_value])
def test_every_gradient_is_clipped(clip: Callable[[nn.Module], None]) -> None:
    model, ours, reference, plain = twin(lr=1e-2)
    for step in range(12):
        for each, optimizer in ((model, ours), (reference, plain)):
            (loss_of(each, step) * 100).backward()
            clip(each)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, reference)
    ours.close()


@pytest.mark.covers("hyperparameters of each group", "groups added later")
def test_a_group_added_later_has_its_own_hyperparameters() -> None:
    model, reference = make_model(), make_model()
    ours = zenflow.ZenFlowAdamW(model[0].parameters(), lr=1e-2, config=SYNCHRONOUS)
    plain = torch.optim.AdamW(reference[0].parameters(), lr=1e-2)
    for step in range(10):
        if step == 4:
            for each, optimizer in ((model, ours), (reference, plain)):
                group = {"params": each[2].parameters(), "lr": 1e-3, "betas": (0.5, 0.9)}
                optimizer.add_param_group(group)
        for each, optimizer in ((model, ours), (reference, plain)):
            loss_of(each, step).backward()
            optimizer.step()
            each.zero_grad()
    assert_close(model, reference)
    assert ours.param_groups[1]["weight_decay"] == plain.param_groups[1]["weight_decay"]
    ours.close()


def test_a_tensor_learning_rate_is_read_in_each_step() -> None:
    model, ours, reference, plain = twin(lr=torch.tensor(1e-2))
    for step in range(6):
        for each, optimizer in ((model, ours), (reference, plain)):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (step + 1))
            loss_of(each, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, reference)
    ours.close()


@pytest.mark.covers("tied weights")
def test_tied_weights_have_one_state() -> None:
    models = [make_model(), make_model()]
    for each in models:
        each[2].weight = nn.Parameter(each[0].weight.detach().t().contiguous())
        each.add_module("tied", nn.Linear(20, 30, bias=False))
        each.tied.weight = each[0].weight
    ours = zenflow.ZenFlowAdamW(models[0].parameters(), config=SYNCHRONOUS)
    plain = torch.optim.AdamW(models[1].parameters())
    for step in range(8):
        for each, optimizer in zip(models, (ours, plain), strict=True):
            loss_of(each[:3], step).backward()
            each.tied(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(*models)
    assert len(ours.state_dict()["state"]) == len(plain.state_dict()["state"])
    ours.close()


# Gradients whose memory is not ours


def hold_alias(grads: list[Tensor]) -> list[Tensor]:
    return [grad.detach() for grad in grads]


def hold_view(grads: list[Tensor]) -> list[Tensor]:
    return [grad.view(-1) for grad in grads]


def hold_same(grads: list[Tensor]) -> list[Tensor]:
    return list(grads)


def hold_array(grads: list[Tensor]) -> list[Tensor]:
    return [torch.from_numpy(grad.numpy()) for grad in grads]


@pytest.mark.covers("gradients in foreign memory")
@pytest.mark.parametrize("hold", [hold_alias, hold_view, hold_same, hold_array])
def test_a_gradient_that_somebody_else_overwrites_later_is_still_exact(
    hold: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    config = {"update_interval": 4, "topk_ratio": 0.1}
    model, expected_model = make_model(), make_model()
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    expected = zenflow.ZenFlowAdamW(expected_model.parameters(), lr=1e-2, config=config)
    for step in range(8):
        loss_of(model, step).backward()
        held = hold([param.grad for param in model.parameters() if param.grad is not None])
        ours.step()
        for tensor in held:
            tensor.fill_(float("nan"))
        loss_of(expected_model, step).backward()
        expected.step()
    ours.close()
    expected.close()
    for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(param, other)


@pytest.mark.covers("gradients in foreign memory")
def test_static_gradient_buffers_are_copied() -> None:
    """As DDP's bucket views and captured graphs have them."""
    config = {"update_interval": 3, "topk_ratio": 0.1}
    model, expected_model = make_model(), make_model()
    ours = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    expected = zenflow.ZenFlowAdamW(expected_model.parameters(), lr=1e-2, config=config)
    flat = torch.zeros(sum(param.numel() for param in model.parameters()))
    for step in range(9):
        loss_of(expected_model, step).backward()
        offset = 0
        for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
            bucket = flat[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
            bucket.copy_(other.grad)
            param.grad = bucket
        expected.step()
        ours.step()
    ours.close()
    expected.close()
    for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(param, other)


def test_where_the_cpu_is_the_device_an_own_gradient_is_not_copied() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = zenflow.ZenFlowAdamW([param], config={"update_interval": 4, "topk_ratio": 0})
    (param * 2).sum().backward()
    assert param.grad is not None
    address = param.grad.data_ptr()
    optimizer.step()
    assert optimizer._engine is not None
    (segment,) = optimizer._engine.pipeline.segments
    assert segment.waiting[0].grad.data_ptr() == address
    optimizer.close()


# Steps that are skipped


@pytest.mark.covers("a gradient that is not finite")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["0.weight", "2.bias"])
def test_a_gradient_that_is_not_finite_changes_nothing(
    value: float, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.named_parameters(), config={"update_interval": 4})
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
    before = optimizer.state_dict()
    weights = [param.detach().clone() for param in model.parameters()]
    loss_of(model, 6).backward()
    model.get_parameter(where).grad.view(-1)[3] = value
    with caplog.at_level(logging.WARNING, "zenflow"):
        optimizer.step()
    assert optimizer.stats.skipped
    assert where in caplog.text
    assert all(map(torch.equal, model.parameters(), weights))
    assert repr(optimizer.state_dict()) == repr(before)
    loss_of(model, 6).backward()
    optimizer.step()
    assert not optimizer.stats.skipped
    assert optimizer.stats.step == 7
    optimizer.close()


def test_a_large_finite_gradient_is_no_overflow() -> None:
    """Its norm overflows in its own dtype, and no element does."""
    for dtype, value in ((torch.float16, 60000.0), (torch.bfloat16, 1e30), (torch.float32, 1e30)):
        param = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        optimizer = zenflow.ZenFlowAdamW([param], config=SYNCHRONOUS)
        param.grad = torch.full_like(param, value)
        optimizer.step()
        assert not optimizer.stats.skipped
        optimizer.close()


def test_a_step_without_gradients_does_nothing() -> None:
    _, optimizer, *_ = twin()
    optimizer.step()
    assert optimizer.stats.step == 0
    assert optimizer.state_dict()["state"] == {}
    optimizer.close()


# What is refused


def sparse(model: nn.Module) -> None:
    embedding = nn.Embedding(100, 8, sparse=True)
    optimizer = zenflow.ZenFlowAdamW(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "lr": (lambda m: zenflow.ZenFlowAdamW(m.parameters(), lr=-1.0), r"lr=-1\.0"),
    "lr nan": (lambda m: zenflow.ZenFlowAdamW(m.parameters(), lr=float("nan")), "lr=nan"),
    "betas": (
        lambda m: zenflow.ZenFlowAdamW(m.parameters(), betas=(0.9, 1.0)),
        r"betas\[1\]=1\.0",
    ),
    "eps": (lambda m: zenflow.ZenFlowAdamW(m.parameters(), eps=-1e-8), "eps=-1e-08"),
    "weight_decay": (
        lambda m: zenflow.ZenFlowAdamW(m.parameters(), weight_decay=-0.1),
        r"weight_decay=-0\.1",
    ),
    "float64": (
        lambda m: zenflow.ZenFlowAdamW(m.double().parameters()),
        r"float64; ZenFlowAdamW trains float32, bfloat16 and float16",
    ),
    "complex": (
        lambda m: zenflow.ZenFlowAdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
        "complex64",
    ),
    "two devices": (
        lambda m: zenflow.ZenFlowAdamW(
            [*m.parameters(), nn.Parameter(torch.zeros(3, device="meta"))]
        ),
        r"several devices \['cpu', 'meta'\]",
    ),
    "no parameters": (lambda m: zenflow.ZenFlowAdamW([]), "empty parameter list"),
    "sparse": (sparse, "sparse=False"),
}


@pytest.mark.covers("refused by name: what is not supported")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(what: str) -> None:
    act, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        act(make_model())


CHANGES: dict[str, Callable[[list[Any], nn.Parameter], Any]] = {
    "added": lambda groups, new: groups[0]["params"].append(new),
    "removed": lambda groups, _: groups[0]["params"].pop(),
    "replaced": lambda groups, new: groups[0]["params"].__setitem__(0, new),
    "a group added": lambda groups, new: groups.append(dict(groups[0], params=[new])),
}


@pytest.mark.covers("refused by name: what is not supported")
@pytest.mark.parametrize("change", CHANGES)
def test_lists_of_parameters_that_somebody_changes_are_refused(change: str) -> None:
    """AdamW trains what it finds in them; a state beside the lists would never hear of it."""
    model = nn.Linear(20, 30)
    optimizer = zenflow.ZenFlowAdamW(model.named_parameters())
    model(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    CHANGES[change](optimizer.param_groups, nn.Parameter(torch.ones(4, 5)))
    model(torch.ones(2, 20)).sum().backward()
    with pytest.raises(ValueError, match=r"(\(4, 5\)|'bias').*add_param_group"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.close()


@pytest.mark.covers("refused by name: what is not supported")
@pytest.mark.parametrize("name", ["amsgrad", "maximize", "capturable", "differentiable", "fused"])
def test_options_of_other_optimizers_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        zenflow.ZenFlowAdamW(make_model().parameters(), **{name: True})


# Workers


def fail_in_worker(*_: Any, **__: Any) -> None:
    raise ArithmeticError("a test broke the kernel")


def broken_after(optimizer: zenflow.ZenFlowAdamW, model: nn.Module) -> None:
    """Train a little, then break every following sweep."""
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer._engine is not None
    platform: Platform = optimizer._engine.platform
    object.__setattr__(platform, "kernel", type("Broken", (), {"sweep": fail_in_worker})())


@pytest.mark.covers("failed workers")
def test_a_worker_that_raises_makes_the_next_step_raise_with_the_cause() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 1})
    broken_after(optimizer, model)
    loss_of(model, 1).backward()
    optimizer.step()
    for _ in range(2):  # and every one after it
        loss_of(model, 2).backward()
        with pytest.raises(HostWorkError, match="restart from the last checkpoint") as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert isinstance(raised.value, RuntimeError)
    optimizer.close()


def train_slowly(model: nn.Module, optimizer: zenflow.ZenFlowAdamW) -> None:
    for step in range(1, 20):
        loss_of(model, step).backward()
        optimizer.step()
        time.sleep(0.05)


@pytest.mark.covers("failed workers")
def test_a_worker_thread_that_dies_makes_the_next_step_raise_within_seconds() -> None:
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(
        model.parameters(), config={"update_interval": 1, "host_threads": 1}
    )
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer._engine is not None
    optimizer._engine.platform.workers._queue.put(None)  # what ends a worker
    begin = time.monotonic()
    with pytest.raises(HostWorkError, match="host worker threads have ended"):
        train_slowly(model, optimizer)
    assert time.monotonic() - begin < 5
    optimizer.close()


# Lives and deaths


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("zenflow-worker")]


def test_no_thread_before_the_first_step_and_none_after_collection() -> None:
    gc.collect()
    before = len(worker_threads())
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
    assert len(worker_threads()) == before
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    assert len(worker_threads()) > before
    masters = [s["master"] for s in optimizer.state_dict()["state"].values() if "master" in s]
    stale = model[0].weight.detach().clone()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert len(worker_threads()) == before
    assert not torch.equal(model[0].weight, stale)  # the closing flush
    assert len(masters) == 2


@pytest.mark.covers("several optimizers")
def test_two_optimizers_in_one_process_do_not_meet() -> None:
    config = {"update_interval": 2, "topk_ratio": 0.1}
    models = [make_model(seed) for seed in (0, 1, 0, 1)]
    optimizers = [zenflow.ZenFlowAdamW(m.parameters(), lr=1e-2, config=config) for m in models]
    for step in range(6):  # the first two interleaved
        for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
            loss_of(model, step).backward()
            optimizer.step()
    for model, optimizer in zip(models[2:], optimizers[2:], strict=True):
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
    for optimizer in optimizers:
        optimizer.close()
    for one, other in ((0, 2), (1, 3)):
        pairs = zip(models[one].parameters(), models[other].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# Figures


@pytest.mark.covers("overlap that can be seen")
def test_stats_are_json_ready_and_add_up() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(100, 100, bias=False) for _ in range(16)]
    model = nn.Sequential(*layers)
    config = {"update_interval": 4, "topk_ratio": 0.1, "select_interval": 5}
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=config)
    assert json.loads(json.dumps(optimizer.stats.to_dict()))["step"] == 0
    traffic = []
    for step in range(24):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        figures = json.loads(json.dumps(optimizer.stats.to_dict()))
        assert figures["step"] == step + 1
        assert figures["update_interval"] == 4
        assert figures["selected_channels"] == 160
        assert figures["staleness_steps"] <= 4
        assert min(figures["stall_s"], figures["step_overhead_s"], figures["host_busy_s"]) >= 0
        traffic.append(figures["traffic_model_sizes"])
    assert optimizer.stats.staleness_steps == 4
    steady = traffic[8:]
    expected = 0.9 * (1 + 1 / 4)
    assert abs(sum(steady) / len(steady) - expected) < 0.02 * expected
    assert max(steady) - min(steady) < 0.02 * expected
    optimizer.close()


def test_selected_channels_are_never_overwritten_by_a_publish() -> None:
    """After every step they are their masters, rounded."""
    param = nn.Parameter(torch.randn(30, 40).bfloat16())
    optimizer = zenflow.ZenFlowAdamW(
        [param], lr=1e-2, config={"update_interval": 3, "topk_ratio": 0.2, "select_interval": 4}
    )
    for _ in range(20):
        param.grad = torch.randn(30, 40).bfloat16()
        optimizer.step()
        assert optimizer._engine is not None
        (segment,) = optimizer._engine.pipeline.segments
        assert isinstance(segment, Segment)
        assert segment.selected is not None
        visible = param.detach()[:, segment.channels.selected]
        assert torch.equal(visible, segment.selected.master.bfloat16())
    optimizer.close()


def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.covers("16-bit state")
@pytest.mark.parametrize("default", [default_dtype, default_device])
def test_state_does_not_follow_torchs_defaults(default: Callable[[], Iterator[None]]) -> None:
    """Scripts set them for their models: host memory stays host memory, and fp32."""
    results = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
        config = {"update_interval": 2, "select_interval": 2, "topk_ratio": 0.2}
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
        grads = [[torch.randn_like(p) for p in model.parameters()] for _ in range(12)]
        with contextlib.contextmanager(default)() if changed else contextlib.nullcontext():
            for number, each in enumerate(grads):
                for param, grad in zip(model.parameters(), each, strict=True):
                    param.grad = grad.clone()
                optimizer.step()
                if number == 6:
                    saved = optimizer.state_dict()
                    assert all(
                        tensor.dtype == torch.float32
                        for state in saved["state"].values()
                        for tensor in state.values()
                    )
                    optimizer.load_state_dict(saved)
            optimizer.close()
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


def test_weights_without_data_are_refused() -> None:
    param = torch.nn.Parameter(torch.empty(20, 20, device="meta"))
    optimizer = zenflow.ZenFlowAdamW([param])
    param.grad = torch.empty_like(param)
    with pytest.raises(
        ValueError, match=r"parameters lie on 'meta'; .* 'cpu' here: move the model"
    ):
        optimizer.step()
    optimizer.close()
