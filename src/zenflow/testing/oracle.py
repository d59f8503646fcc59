"""The algorithm as a sequential program in which every delay is an index.

No threads, no streams, no sides: each block of rows keeps master and moments of all its channels in one
place, and "deferred" means that a channel's gradients are applied some steps later. The text that it
follows is docs/design.md, "Exact semantics"; the runtime equals it bit for bit in fp32 arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.channels import channel_view
from zenflow.core.selection import channel_energy

SYNCHRONOUS_AFTER_EDIT = 16


@dataclass
class Hyper:
    """One gradient's sub-step: its group's values at its step, and the parameter's step count."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    count: int
    scale: float


def adamw(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, h: Hyper
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One sub-step; returns the new master and moments and the update that was subtracted."""
    beta1, beta2 = h.betas
    g = grad.float() if h.scale == 1 else grad.float() * h.scale
    p = p * (1 - h.lr * h.weight_decay)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    u = update_of(m, v, h)
    return p - u, m, v, u


def update_of(m: Tensor, v: Tensor, h: Hyper) -> Tensor:
    """The bias-corrected update that these moments stand for."""
    beta1, beta2 = h.betas
    root = v.double().sqrt().float()  # torch's fp32 root is not always rounded correctly
    denominator = root * (1 / math.sqrt(1 - beta2**h.count)) + h.eps
    return (m / denominator) * (h.lr / (1 - beta1**h.count))


@dataclass
class Block:
    """Rows of one weight, ``[R, C]`` or ``[R, C, K]``; master and moments are of the same shape."""

    rows: slice
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    selected: Tensor
    middle: int
    total: int
    waiting: list[tuple[int, Tensor, Hyper]] = field(default_factory=list)
    unpublished: tuple[int, Tensor] | None = None
    adopted: int = 0
    count: int = 0
    last: Hyper | None = None
    extrapolated: bool = False
    factors_at: int = 0
    factors: tuple[Tensor, Tensor] | None = None

    def phase(self, interval: int) -> int:
        """Of the steps modulo ``interval``, the one that it is swept at."""
        return self.middle * interval // self.total

    def on(self, selected: bool) -> Tensor:
        """The mask of the selected or of the deferred channels, for broadcasting."""
        mask = self.selected if selected else ~self.selected
        return mask.reshape(1, -1, *[1] * (self.master.dim() - 2))

    def apply(self, selected: bool, grad: Tensor, hyper: Hyper) -> None:
        """One sub-step on one side's channels."""
        state = (self.master, self.exp_avg, self.exp_avg_sq)
        new = adamw(*state, grad, hyper)[:3]
        mask = self.on(selected)
        self.master, self.exp_avg, self.exp_avg_sq = (
            torch.where(mask, a, b) for a, b in zip(new, state, strict=True)
        )


class Parameter:
    """One parameter: what the user sees (``weight``), and what is kept for it."""

    def __init__(self, weight: Tensor, config: ZenFlowConfig, hyper: dict[str, Any]) -> None:
        self.weight = weight.detach().clone()
        self.hyper = hyper
        self.last: Hyper | None = None
        self.count = 0
        self.blocks: list[Block] = []
        self.plan: list[tuple[slice, int, int]] = []
        self.edited = False
        self.synchronous_until = 0
        channels = weight.shape[1] if weight.dim() >= 2 else 0
        ratio = config.topk_ratio
        self.k = 0 if ratio == 0 else min(channels, max(1, round(ratio * channels)))
        self.split = weight.dim() >= 2 and weight.numel() >= 64 and self.k < channels
        # of a resident
        self.master: Tensor | None = None
        self.exp_avg = torch.zeros(weight.shape)
        self.exp_avg_sq = torch.zeros(weight.shape)
        # of the selection
        self.choices: list[tuple[int, Tensor]] = []
        self.arrived = 0
        self.interval = 0
        self.score_at = 0

    @property
    def view(self) -> Tensor:
        return channel_view(self.weight)

    def choose(self, grad: Tensor) -> Tensor:
        """The mask of the k channels of largest energy, ties by the lower index."""
        energy = channel_energy(channel_view(grad)).tolist()
        order = sorted(range(len(energy)), key=lambda c: (-energy[c], c))
        mask = torch.zeros(len(energy), dtype=torch.bool)
        mask[order[: self.k]] = True
        return mask


class Oracle:
    """Trains copies of ``weights``.

    Args:
        weights: initial values, any shapes, fp32, bf16 or fp16.
        groups: dicts with ``"params"`` (indices into ``weights``), ``lr``, ``betas``, ``eps``,
            ``weight_decay``; values may be changed between steps. Missing ones have AdamW's defaults.
        config: the settings; for ``update_interval="auto"``, ``intervals`` says what was chosen.
        intervals: the update interval of each applied step, from the first.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        config: ZenFlowConfig,
        intervals: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.intervals = intervals
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        for group in groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        owner = {i: group for group in groups for i in group["params"]}
        self.params = [Parameter(w, config, owner[i]) for i, w in enumerate(weights)]
        self.t = 0
        self.skipped = False
        self.order: dict[int, int] = {}
        self._plan([self.params[i] for group in groups for i in group["params"]])

    def _plan(self, params: Sequence[Parameter]) -> None:
        """Row blocks and their phases."""
        split = [p for p in params if p.split]
        self.order |= {id(p): i for i, p in enumerate(split, len(self.order))}
        total = sum(p.weight.numel() for p in split)
        largest = max(65536, total // 64)
        before = 0
        for p in split:
            rows, row_numel = p.view.shape[0], p.view[0].numel()
            num_blocks = math.ceil(rows / max(1, largest // row_numel))
            height = math.ceil(rows / num_blocks)
            for start in range(0, rows, height):
                stop = min(rows, start + height)
                middle = 2 * before + (stop - start) * row_numel
                p.plan.append((slice(start, stop), middle, 2 * total))
                before += (stop - start) * row_numel

    # What a test compares

    def weights(self) -> list[Tensor]:
        """As the user sees them."""
        return [p.weight.clone() for p in self.params]

    def masters(self) -> list[Tensor | None]:
        """fp32 masters; None for a resident fp32 parameter, which is its own, and before state."""
        return [
            _joined([b.master for b in p.blocks], p) if p.blocks else p.master for p in self.params
        ]

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """First and second moments, raw."""
        return [
            (
                _joined([b.exp_avg for b in p.blocks], p),
                _joined([b.exp_avg_sq for b in p.blocks], p),
            )
            if p.blocks
            else (p.exp_avg, p.exp_avg_sq)
            for p in self.params
        ]

    def staleness(self) -> int:
        """Most steps that a visible weight lags behind AdamW."""
        oldest = [
            b.unpublished[0] if b.unpublished else b.waiting[0][0]
            for b in self._blocks()
            if b.waiting or b.unpublished
        ]
        return self.t - min(oldest) + 1 if oldest else 0

    def _blocks(self) -> list[Block]:
        return [b for p in self.params for b in p.blocks]

    # What a test does

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One ``step()`` with these gradients."""
        present = [(p, g) for p, g in zip(self.params, grads, strict=True) if g is not None]
        self.skipped = any(not torch.isfinite(g).all() for _, g in present)
        if self.skipped or not present:
            return
        scale = self._clip([g for _, g in present])
        self._take_edits()
        self.t += 1
        warm_up = self.t <= self.config.full_warm_up_rounds
        overlap = self.config.overlap_step and not warm_up
        interval = 1 if warm_up else self._interval()
        self._publish()
        self._adopt()
        for p, grad in present:
            self._take(p, grad, scale, shown=overlap or interval > 1)
        delay = (interval + 1) / 2 if overlap else (interval - 1) / 2
        max_age = interval
        if self.config.update_interval == "auto":
            max_age = max(interval, self.config.max_update_interval)
        for p in self.params:
            synchronous = self.t <= p.synchronous_until
            for b in p.blocks:
                if not b.waiting:
                    continue
                age = self.t - b.waiting[0][0] + 1
                if synchronous:
                    self._sweep(b, p, 0.0)
                    self._publish_block(b, p)
                elif self.t % interval == b.phase(interval) or age >= max_age:
                    self._sweep(b, p, delay if self.config.lookahead else 0.0)
        if not overlap:
            self._publish()

    def synchronize(self) -> None:
        """Apply and publish everything; no weight stays extrapolated."""
        self._take_edits()
        self._publish()
        for p in self.params:
            for b in p.blocks:
                if b.waiting:
                    self._sweep(b, p, 0.0)
                elif b.extrapolated:
                    b.unpublished, b.extrapolated = (0, b.master.to(p.weight.dtype)), False
        self._publish()

    def add_group(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """More parameters, behind those there are; they form a segment table of their own."""
        added = [Parameter(weight, self.config, group) for weight in weights]
        self.params += added
        self._plan(added)

    def reconfigure(self, config: ZenFlowConfig) -> None:
        """Go on under a config that shows previews, or does not."""
        self.config = config
        for b in self._blocks():
            if not config.shows_previews:
                b.factors_at, b.factors = 0, None

    def edit(self, index: int, value: Tensor) -> None:
        """The user writes a weight between two steps."""
        self.params[index].weight = value.detach().clone()
        self.params[index].edited = True

    # The stages

    def _interval(self) -> int:
        if self.intervals is not None:
            return self.intervals[self.t - 1]
        if self.config.update_interval == "auto":
            assert not self.config.overlap_step, "an automatic interval needs its recorded trace"
            return 1
        return self.config.update_interval

    def _clip(self, grads: Sequence[Tensor]) -> float:
        if self.config.max_grad_norm is None:
            return 1.0
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        total = float(torch.linalg.vector_norm(torch.stack(norms).double()))
        return min(1.0, self.config.max_grad_norm / (total + 1e-6))

    def _take_edits(self) -> None:
        for p in self.params:
            edited, p.edited = p.edited, False
            if not edited or not p.count:
                continue
            if not p.split:
                p.master = p.weight.float() if p.weight.dtype != torch.float32 else None
                continue
            for b in p.blocks:
                if b.waiting:
                    self._sweep(b, p, 0.0)
                b.master = p.view[b.rows].float()
                b.unpublished, b.extrapolated = None, False
            p.synchronous_until = self.t + SYNCHRONOUS_AFTER_EDIT

    def _publish(self) -> None:
        for p in self.params:
            for b in p.blocks:
                self._publish_block(b, p)

    def _publish_block(self, b: Block, p: Parameter) -> None:
        if b.unpublished is not None:
            rows = p.view[b.rows]
            rows.copy_(torch.where(b.on(selected=False), b.unpublished[1], rows))
            b.unpublished = None

    def _adopt(self) -> None:
        for p in self.params:
            if p.arrived < len(p.choices) and p.choices[p.arrived][0] < self.t:
                scored, chosen = p.choices[p.arrived]
                changed = (chosen & ~p.choices[p.arrived - 1][1]).sum().item() / p.k
                if self.config.select_interval == "auto":
                    if changed < 0.1:
                        p.interval = min(2 * p.interval, 64)
                    elif changed > 0.3:
                        p.interval = max(p.interval // 2, 4)
                    p.score_at = scored + p.interval
                p.arrived += 1
            for b in p.blocks:
                if p.k and b.adopted < p.arrived and not b.waiting:
                    self._hand_over(b, p, p.choices[p.arrived - 1][1])
                    b.adopted = p.arrived

    def _hand_over(self, b: Block, p: Parameter, chosen: Tensor) -> None:
        """Under "accumulate" the two sides differ in their counts; keep what an update would read."""
        if self.config.update_rule == "accumulate" and b.count != p.count:
            assert p.last is not None
            incoming, outgoing = chosen & ~b.selected, b.selected & ~chosen
            for moment, beta in zip((b.exp_avg, b.exp_avg_sq), p.last.betas, strict=True):
                to_selected = (1 - beta**p.count) / (1 - beta**b.count)
                to_deferred = (1 - beta**b.count) / (1 - beta**p.count)
                moment[:, incoming] = moment[:, incoming] * to_selected
                moment[:, outgoing] = moment[:, outgoing] * to_deferred
        b.selected = chosen
        if b.factors is not None:
            b.factors = (b.factors[0], torch.where(b.on(False)[0], b.factors[1], 0))
        visible = p.view[b.rows]
        visible.copy_(torch.where(b.on(True), b.master.to(visible.dtype), visible))

    def _take(self, p: Parameter, grad: Tensor, scale: float, *, shown: bool) -> None:
        p.count += 1
        h = p.hyper
        hyper = Hyper(float(h["lr"]), h["betas"], h["eps"], h["weight_decay"], p.count, scale)
        p.last = hyper
        if not p.split:
            master = p.weight.float() if p.master is None else p.master
            master, p.exp_avg, p.exp_avg_sq, _ = adamw(master, p.exp_avg, p.exp_avg_sq, grad, hyper)
            p.weight = master.to(p.weight.dtype)
            p.master = None if p.weight.dtype == torch.float32 else master
            return
        self._score(p, grad)
        for b in p.blocks:
            rows = channel_view(grad)[b.rows]
            b.apply(True, rows, hyper)
            visible = p.view[b.rows]
            visible.copy_(torch.where(b.on(True), b.master.to(visible.dtype), visible))
            b.waiting.append((self.t, rows.clone(), hyper))
            if shown and b.factors is not None:
                self._preview(b, visible, rows, hyper)

    def _preview(self, b: Block, visible: Tensor, grad: Tensor, h: Hyper) -> None:
        """Deferred weights show a gradient, roughly, until the publish that holds it."""
        assert b.factors is not None
        by_row, by_column = b.factors
        move = (grad.float() * (by_row * h.scale)).clamp(-1e30, 1e30) * by_column
        moved = visible.float() - move.clamp(-3, 3) * (h.lr * 0.3)
        visible.copy_(torch.where(b.on(False), moved.to(visible.dtype), visible))

    def _refresh(self, b: Block) -> None:
        """The rank-one approximation of ``1 / sqrt(v)``, taken anew ever less often."""
        shows = self.config.shows_previews
        if not shows or b.count - b.factors_at < min(64, max(1, b.factors_at // 4)):
            return
        assert b.last is not None
        b.factors_at = b.count
        mask = b.on(False).expand(b.exp_avg_sq.shape)
        v = torch.where(mask, b.exp_avg_sq, 0).double()
        v = v / (1 - b.last.betas[1] ** b.count)
        rows = v.flatten(1).sum(1) / mask[0].sum()
        columns = v.sum(0) / len(v)
        by_row = torch.where(rows > 0, 1 / (rows.sqrt() + b.last.eps), 0)
        ratio = torch.where(columns > 0, (rows.mean() / columns).sqrt().clamp(max=1e6), 0)
        ratio = torch.where(mask[0], ratio, 0)
        if not rows.mean().isfinite():
            by_row, ratio = torch.zeros_like(by_row), torch.zeros_like(ratio)
        short = [x.float().bfloat16().float() for x in (by_row, ratio)]
        b.factors = (short[0].reshape(-1, *[1] * (v.dim() - 1)), short[1])

    def _score(self, p: Parameter, grad: Tensor) -> None:
        """The first choice holds at once, with the state that begins here; later ones are adopted."""
        wanted = self.config.select_interval
        if not p.blocks:
            chosen = p.choose(grad)
            for rows, middle, total in p.plan:
                master = p.view[rows].float()
                zeros = torch.zeros_like(master)
                p.blocks.append(
                    Block(rows, master, zeros, zeros.clone(), chosen, middle, total, adopted=1)
                )
            p.choices, p.arrived = [(self.t, chosen)], 1
            p.interval = 4 if wanted == "auto" else wanted
            p.score_at = self.t + p.interval - self.order[id(p)] % p.interval
        elif p.k and self.t >= p.score_at:
            p.choices.append((self.t, p.choose(grad)))
            p.score_at = self.t + p.interval

    def _sweep(self, b: Block, p: Parameter, delay: float) -> None:
        """Apply a block's waiting gradients to its deferred channels; form the weights to publish."""
        slots, b.waiting = b.waiting, []
        if self.config.update_rule == "accumulate":
            total = slots[0][1].float() * slots[0][2].scale
            for _, grad, hyper in slots[1:]:
                total = total + grad.float() * hyper.scale
            b.count += 1
            mean, last = total * (1 / len(slots)), slots[-1][2]
            one = Hyper(last.lr, last.betas, last.eps, last.weight_decay, b.count, 1.0)
            b.apply(False, mean, one)
            b.last = one
        else:
            for _, grad, hyper in slots:
                b.apply(False, grad, hyper)
            b.count = slots[-1][2].count
            b.last = slots[-1][2]
        self._refresh(b)
        ahead = b.master
        if delay:
            ahead = b.master - update_of(b.exp_avg, b.exp_avg_sq, b.last) * delay
        b.unpublished = (slots[0][0], ahead.to(p.weight.dtype))
        b.extrapolated = delay != 0


def _joined(blocks: Sequence[Tensor], p: Parameter) -> Tensor:
    return torch.cat(list(blocks)).reshape(p.weight.shape)
