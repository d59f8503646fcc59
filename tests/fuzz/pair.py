"""An optimizer and the oracle, driven by the same calls. After each, every weight has the same bits.

A call draws all that is random in it from a seed of its own, so calls can be dropped from a sequence
without a change in those that are left.
"""

import copy
import dataclasses
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from links import CopyLink
from runs import grad_like, same_bits
from torch import Tensor, nn

import zenflow
from zenflow.runtime.platform import Platform
from zenflow.testing.oracle import Oracle

Shape = tuple[int, ...]
Group = dict[str, Any]


class LinkedAdamW(zenflow.ZenFlowAdamW):
    """With a link between device and host memory, as beside an accelerator."""

    def _make_platform(self, device: torch.device) -> Platform:
        return dataclasses.replace(super()._make_platform(device), link=CopyLink())


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, on both sides.

    Attributes:
        state: the file of the optimizer's state.
        weights: of the model, as they were beside it.
        groups: the oracle's hyperparameters, the same objects as in ``oracle``.
    """

    state: bytes
    weights: list[Tensor]
    oracle: Oracle
    groups: list[Group]


class Pair:
    """Starts with two groups over ``shapes``.

    Args:
        seed: of the initial weights and hyperparameters.
        shapes: of the parameters.
        dtype: of the weights, a name in ``torch``.
        config: of the optimizer.
        transposed: the first parameter is not contiguous.
        linked: device and host have memories of their own.
    """

    def __init__(
        self,
        *,
        seed: int,
        shapes: Sequence[Shape],
        dtype: str,
        config: dict[str, Any],
        transposed: bool = False,
        linked: bool = False,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.config = dict(config)
        self.linked = linked
        numbers = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=numbers).to(self.dtype) for shape in shapes]
        self.transposed = transposed
        self.params = [self._parameter(i, weight) for i, weight in enumerate(weights)]
        cut = len(weights) // 2
        choose = random.Random(seed)
        self.groups: list[Group] = [
            _hyper(choose) | {"params": list(range(cut))},
            _hyper(choose) | {"params": list(range(cut, len(weights)))},
        ]
        self.optimizer = self._new_optimizer()
        self.oracle = Oracle(weights, self.groups, self.optimizer.config)
        self.saved: list[Saved] = []

    # What a user does

    def step(
        self,
        seed: int,
        *,
        parts: int = 1,
        bad: bool = False,
        dropped: bool = False,
        between: str | None = None,
    ) -> None:
        """Backward passes and a ``step()``.

        Args:
            parts: backward passes that add up.
            bad: a gradient is not finite.
            dropped: before that, a backward pass whose gradients are zeroed.
            between: a call made between the last backward pass and ``step()``.
        """
        choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        if dropped:
            self._backward(self._draw_grads(choose, numbers), last=True)
            self.optimizer.zero_grad()
        total: list[Tensor | None] = [None] * len(self.params)
        for part in range(parts):
            last = part == parts - 1
            grads = self._draw_grads(choose, numbers)
            if bad and last:
                _spoil(choose, grads)
            self._backward(grads, last=last)
            total = [_add(one, other) for one, other in zip(total, grads, strict=True)]
        if between is not None:
            self._do_between(between, seed)
        self.optimizer.step()
        self.oracle.step(total)
        self._compare()
        if any(grad is not None for grad in total):
            self._compare_stats()

    def idle(self) -> None:
        """A ``step()`` without any gradient."""
        self.optimizer.step()
        self.oracle.step([None] * len(self.params))
        self._compare()

    def freeze(self, seed: int) -> None:
        """A parameter is frozen, or unfrozen if it was."""
        param = self.params[seed % len(self.params)]
        param.requires_grad_(not param.requires_grad)

    def hyper(self, seed: int) -> None:
        """A scheduler, or the user, changes a group."""
        choose = random.Random(seed)
        number = choose.randrange(len(self.groups))
        values = _hyper(choose)
        self.groups[number].update(values)
        self.optimizer.param_groups[number].update(values)

    def add_group(self, seed: int, shapes: Sequence[Shape]) -> None:
        numbers = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=numbers).to(self.dtype) for shape in shapes]
        first = len(self.params)
        added = [self._parameter(i, weight) for i, weight in enumerate(weights, first)]
        values = _hyper(random.Random(seed))
        self.params += added
        self.optimizer.add_param_group(values | {"params": added})
        self.groups.append(values | {"params": list(range(first, len(self.params)))})
        self.oracle.add_group(weights, self.groups[-1])
        self._compare()

    def edit(self, seed: int, how: str = "in place") -> None:
        """The user writes one weight, or with "load_state_dict" all of them."""
        choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        indices = [choose.randrange(len(self.params))]
        if how == "load_state_dict":
            indices = list(range(len(self.params)))
        if how == "data" and not self._shows(self.params[indices[0]]):
            how = "in place"
        values = {
            i: torch.randn(self.params[i].shape, generator=numbers).to(self.dtype) for i in indices
        }
        if how == "load_state_dict":
            model = nn.ParameterList(self.params)
            model.load_state_dict({str(i): value for i, value in values.items()})
        for i, value in values.items():
            if how == "in place":
                with torch.no_grad():
                    self.params[i].copy_(value)
            elif how == "data":
                self.params[i].data.copy_(value)
            elif how == "memory":
                self.params[i].data = value.clone()
            self.oracle.edit(i, value)
        self._compare()

    def synchronize(self) -> None:
        self.optimizer.synchronize()
        self.oracle.synchronize()
        self._compare()
        assert self.optimizer.stats.staleness_steps == 0

    def look(self) -> None:
        """Read the state, which changes nothing. An edit not seen yet may or may not be in it."""
        if any(p.edited for p in self.oracle.params):
            self.optimizer.state_dict()
        else:
            self._compare_state()
        self._compare()

    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        weights = [param.detach().clone() for param in self.params]
        self.saved.append(Saved(file.getvalue(), weights, *_copies(self.oracle, self.groups)))
        self._compare()

    def load(
        self,
        which: int,
        *,
        into: str,
        weights: str = "first",
        stream: bool | None = None,
        linked: bool | None = None,
    ) -> None:
        """Go back to an earlier save; later ones are forgotten.

        Args:
            which: the save, modulo how many there are; without any, nothing is done.
            into: the "same" optimizer, or a "new" one over new parameters.
            weights: the model's saved ones are loaded "first" or "after" the optimizer's state, or the
                model's present ones are "kept".
            stream: whether a new optimizer streams gradients; None for as before.
            linked: whether its memories are apart; None for as before.
        """
        if not self.saved:
            return
        which %= len(self.saved)
        saved = self.saved[which]
        state = torch.load(io.BytesIO(saved.state), weights_only=True)
        if into == "same" and len(saved.groups) != len(self.groups):
            _assert_refused(self.optimizer, state)
            self._compare()
            return
        self.saved = self.saved[: which + 1]
        if into == "new":
            self.linked = self.linked if linked is None else linked
            self._reopen(saved, weights, stream)
        elif weights == "first":
            self._write(saved.weights)
        self.optimizer.load_state_dict(state)
        if weights == "after":
            self._write(saved.weights)
        self.oracle, self.groups = _copies(saved.oracle, saved.groups)
        self.oracle.reconfigure(self.optimizer.config)
        for i, (param, known) in enumerate(zip(self.params, self.oracle.weights(), strict=True)):
            if not same_bits(param.detach(), known):
                assert weights == "kept"
                self.oracle.edit(i, param.detach().clone())
        self._compare()

    def reopen(self, *, stream: bool | None = None, linked: bool | None = None) -> None:
        """Save, close, and go on in another process."""
        self.save()
        self.load(len(self.saved) - 1, into="new", stream=stream, linked=linked)

    def end(self) -> None:
        """What every sequence ends with."""
        self.synchronize()
        self.look()
        self.close()

    def close(self) -> None:
        self.optimizer.close()

    # How

    def _parameter(self, index: int, weight: Tensor) -> nn.Parameter:
        weight = weight.clone()
        if self.transposed and index == 0:
            weight = weight.t().contiguous().t()
        return nn.Parameter(weight)

    def _new_optimizer(self) -> zenflow.ZenFlowAdamW:
        """With the first groups at construction, since groups added later form tables of their own."""
        groups = [g | {"params": [self.params[i] for i in g["params"]]} for g in self.groups]
        make = LinkedAdamW if self.linked else zenflow.ZenFlowAdamW
        optimizer = make(groups[:2], config=self.config)
        for group in groups[2:]:
            optimizer.add_param_group(group)
        return optimizer

    def _reopen(self, saved: Saved, weights: str, stream: bool | None) -> None:
        present = [param.detach().clone() for param in self.params]
        trains = [param.requires_grad for param in self.params]
        self.optimizer.close()
        self.oracle.synchronize()
        self._compare()
        begin = {
            "first": saved.weights,
            "after": [torch.zeros_like(weight) for weight in saved.weights],
            "kept": present[: len(saved.weights)],
        }[weights]
        self.params = [self._parameter(i, weight) for i, weight in enumerate(begin)]
        for param, before in zip(self.params, trains, strict=False):
            param.requires_grad_(before)
        self.groups = saved.groups
        if stream is not None:
            self.config["stream_gradients"] = stream
        self.optimizer = self._new_optimizer()

    @torch.no_grad()
    def _write(self, weights: Sequence[Tensor]) -> None:
        for param, weight in zip(self.params, weights, strict=True):
            param.copy_(weight)

    def _draw_grads(self, choose: random.Random, numbers: torch.Generator) -> list[Tensor | None]:
        """Some parameters have none."""
        drawn = [
            grad_like(param, numbers) if choose.random() < 0.85 else None for param in self.params
        ]
        return [
            grad if param.requires_grad else None
            for param, grad in zip(self.params, drawn, strict=True)
        ]

    def _backward(self, grads: Sequence[Tensor | None], *, last: bool) -> None:
        """A backward pass that leaves exactly these gradients."""
        terms = [
            (param * grad).sum().float()
            for param, grad in zip(self.params, grads, strict=True)
            if grad is not None
        ]
        if not terms:
            return
        if last:
            torch.stack(terms).sum().backward()
            return
        with self.optimizer.accumulate():
            torch.stack(terms).sum().backward()

    def _do_between(self, what: str, seed: int) -> None:
        """Between a backward pass and ``step()``, when gradients may have been taken already."""
        getattr(self, what)(**({"seed": seed} if what == "edit" else {}))

    def _shows(self, param: Tensor) -> bool:
        """Whether a write through ``.data`` can be seen: not where each lane has a selected channel."""
        engine = self.optimizer._engine
        weight = None if engine is None else engine.weights.get(param)
        return weight is None or all(
            s.side is None or bool(s.side.deferred_lanes.any()) for s in weight.segments
        )

    def _compare(self) -> None:
        for i, (param, expected) in enumerate(zip(self.params, self.oracle.weights(), strict=True)):
            if not same_bits(param.detach(), expected):
                differ = int((param.detach() != expected).sum())
                raise AssertionError(
                    f"weight {i} of shape {tuple(param.shape)} differs from the oracle's in "
                    f"{differ} of {param.numel()} elements after applied step {self.oracle.t}"
                )

    def _compare_state(self) -> None:
        saved = self.optimizer.state_dict()["state"]
        moments, masters = self.oracle.moments(), self.oracle.masters()
        for i, expected in enumerate(self.oracle.params):
            state = saved.get(i)
            if state is None or state["step"] == 0:  # a gradient that was dropped began it
                assert expected.count == 0, i
                continue
            assert state["step"] == expected.count, i
            assert same_bits(state["exp_avg"], moments[i][0]), i
            assert same_bits(state["exp_avg_sq"], moments[i][1]), i
            master = masters[i]
            if "master" in state:
                assert master is not None and same_bits(state["master"], master), i

    def _compare_stats(self) -> None:
        stats = self.optimizer.stats
        assert stats.skipped == self.oracle.skipped
        if stats.skipped:
            return
        assert stats.step == self.oracle.t, (stats.step, self.oracle.t)
        assert stats.staleness_steps == self.oracle.staleness()


def _hyper(choose: random.Random) -> Group:
    return {
        "lr": choose.choice([0.0, 1e-3, 3e-3, 1e-2]),
        "betas": choose.choice([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)]),
        "eps": choose.choice([1e-8, 1e-6]),
        "weight_decay": choose.choice([0.0, 0.1]),
    }


def _spoil(choose: random.Random, grads: Sequence[Tensor | None]) -> None:
    for grad in grads:
        if grad is not None and grad.numel():
            grad.view(-1)[-1] = choose.choice([float("nan"), float("inf"), float("-inf")])
            return


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _copies(oracle: Oracle, groups: list[Group]) -> tuple[Oracle, list[Group]]:
    """Of both together, since the oracle's parameters refer to the groups."""
    other, other_groups = copy.deepcopy((oracle, groups))
    numbers = [oracle.order.get(id(p)) for p in oracle.params]
    other.order = {id(p): n for p, n in zip(other.params, numbers, strict=True) if n is not None}
    return other, other_groups


def _assert_refused(optimizer: zenflow.ZenFlowAdamW, state: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(state)
    except ValueError:
        return
    raise AssertionError("a state of other groups was taken")
