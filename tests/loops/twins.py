"""One loop, run twice: with AdamW and with ours, or with ours beside a shadow of it.

- **twin**: the same function trains two equal models, one with ``torch.optim.AdamW``. Where ours promises
  to be AdamW, the weights and whatever the loop returned have to be equal at the end. What differs by
  more than ``atol`` may differ no more than AdamW does from itself when its weights are rounded
  otherwise: a gradient that is zero but for rounding, as of attention's key bias, is scaled up by AdamW.
- **shadow**: a loop's gradients depend on its weights, so with overlap there is no such twin. Instead each
  gradient that ``step()`` is given is also given to an AdamW of fp32 copies. Once synchronized, ours has to
  equal it: each gradient was applied exactly once, with the hyperparameters of its own step.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zenflow

Loop = Callable[[nn.Module, Optimizer], Any]
"""Trains the model; what it returns (losses, counts) is compared between twins."""

SYNCHRONOUS: dict[str, Any] = {
    "overlap_step": False,
    "update_interval": 1,
    "select_interval": 3,
    "topk_ratio": 0.2,
}
OVERLAPPED: dict[str, Any] = {"update_interval": 3, "select_interval": 3, "topk_ratio": 0.2}
TWINS: dict[str, dict[str, Any]] = {
    "synchronous": SYNCHRONOUS,
    "all selected": {"topk_ratio": 1, "update_interval": 4},
}
ATOL = 1e-6
MOST_NOISE = 10
"""Times ``atol``: a loop that turns rounding into more than this compares nothing."""


def check_twin(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    config: dict[str, Any],
    atol: float = ATOL,
    **hyper: Any,
) -> None:
    """Train with AdamW and with ours and compare weights, buffers and what the loop returned."""

    def make_ours(params: Iterator[nn.Parameter]) -> Optimizer:
        return zenflow.ZenFlowAdamW(params, config=config, **hyper)

    weights, moved, returned = _train(make_model, loop, make_ours)
    expected, expected_moved, expected_returned = _train(
        make_model, loop, functools.partial(torch.optim.AdamW, **hyper)
    )
    assert any(moved) and moved == expected_moved
    torch.testing.assert_close(returned, expected_returned, rtol=1e-3, atol=10 * atol)
    if all(_difference(weights[name], tensor) <= atol for name, tensor in expected.items()):
        return
    nudged, _, _ = _train(make_model, loop, functools.partial(_NudgedAdamW, **hyper))
    for name, tensor in expected.items():
        noise = _difference(nudged[name], tensor)
        assert noise <= MOST_NOISE * atol, f"{name}: rounding alone moves it by {noise}"
        difference, allowed = _difference(weights[name], tensor), max(atol, 4 * noise)
        assert difference <= allowed, f"{name}: differs by {difference}, allowed {allowed}"


class _NudgedAdamW(torch.optim.AdamW):
    """AdamW whose new weights are rounded up or down at random, by one unit in the last place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generator = torch.Generator().manual_seed(0)

        def nudge(*_: Any) -> None:
            for param in (p for group in self.param_groups for p in group["params"]):
                if param.grad is not None:
                    up = torch.randint(2, param.shape, generator=generator).to(param.dtype)
                    with torch.no_grad():
                        param.mul_(1 + (2 * up - 1) * torch.finfo(param.dtype).eps)

        self.register_step_post_hook(nudge)


def _train(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
) -> tuple[dict[str, Tensor], list[bool], Any]:
    """Weights and buffers, which parameters have moved, and what the loop returned."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    torch.manual_seed(1)
    returned = loop(model, optimizer)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    if isinstance(optimizer, zenflow.ZenFlowAdamW):
        optimizer.close()
    return model.state_dict(), moved, returned


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest; infinite where only one of two values is finite."""
    assert one.shape == other.shape and one.dtype == other.dtype
    if torch.equal(one, other):
        return 0.0
    difference = (one.double() - other.double()).abs()
    return difference.nan_to_num(math.inf).max().item()


class Shadow:
    """An AdamW of fp32 copies that is given each gradient that ``optimizer.step()`` is given."""

    def __init__(self, optimizer: zenflow.ZenFlowAdamW) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = []
        self.copies: list[nn.Parameter] = []
        self.adamw: torch.optim.AdamW | None = None
        self._follow()
        optimizer.register_step_pre_hook(self._before_step)

    def take_weights(self) -> None:
        """The user has edited the weights."""
        for param, shadow in zip(self.params, self.copies, strict=True):
            shadow.data.copy_(param.detach())

    def assert_equal(self, atol: float = ATOL) -> None:
        """Synchronized, masters are the shadow's weights and weights are the masters, rounded."""
        self.optimizer.synchronize()
        states = self.optimizer.state_dict()["state"]
        for number, (param, expected) in enumerate(zip(self.params, self.copies, strict=True)):
            master = states.get(number, {}).get("master", param.detach())
            torch.testing.assert_close(
                master.float(),
                expected.detach(),
                rtol=0,
                atol=atol,
                msg=lambda text, number=number: f"{number}: {text}",
            )
            assert torch.equal(param.detach(), master.to(param.dtype)), number

    def _follow(self) -> None:
        """Copy groups that are new."""
        known = 0 if self.adamw is None else len(self.adamw.param_groups)
        for group in self.optimizer.param_groups[known:]:
            copies = [nn.Parameter(p.detach().float().clone()) for p in group["params"]]
            self.params += group["params"]
            self.copies += copies
            options = {k: copy.copy(group[k]) for k in ("lr", "betas", "eps", "weight_decay")}
            if self.adamw is None:
                self.adamw = torch.optim.AdamW([{"params": copies, **options}])
            else:
                self.adamw.add_param_group({"params": copies, **options})

    def _before_step(self, *_: Any) -> None:
        self._follow()
        assert self.adamw is not None
        for group, own in zip(self.optimizer.param_groups, self.adamw.param_groups, strict=True):
            own.update({k: copy.copy(group[k]) for k in ("lr", "betas", "eps", "weight_decay")})
        for param, shadow in zip(self.params, self.copies, strict=True):
            shadow.grad = None if param.grad is None else param.grad.detach().float().clone()
        if all(s.grad is None or bool(s.grad.isfinite().all()) for s in self.copies):
            self.adamw.step()


def check_shadow(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    config: dict[str, Any] = OVERLAPPED,
    **hyper: Any,
) -> None:
    """Train with ours and compare with the shadow; the lag stays within the update interval."""
    model = make_model()
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=config, **hyper)
    shadow, lags = Shadow(optimizer), []
    optimizer.register_step_post_hook(lambda *_: lags.append(optimizer.stats.staleness_steps))
    torch.manual_seed(1)
    loop(model, optimizer)
    assert lags and max(lags) <= config["update_interval"]
    shadow.assert_equal()
    optimizer.close()


def check_streamed(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    config: dict[str, Any] = OVERLAPPED,
    **hyper: Any,
) -> None:
    """Gradients taken during the backward pass change no bit, without previews, which they have not."""
    results = []
    for stream in (True, False):
        model = make_model()
        streamed = config | {"stream_gradients": stream, "preview": False}
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=streamed, **hyper)
        torch.manual_seed(1)
        returned = loop(model, optimizer)
        optimizer.close()
        results.append((list(model.parameters()), returned))
    (params, returned), (expected, expected_returned) = results
    assert_same_bits(params, expected)
    assert returned == expected_returned


def assert_same_bits(params: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(params, expected, strict=True)):
        assert torch.equal(one, other), number


def seeded(*shape: int, seed: int) -> Tensor:
    """Normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
