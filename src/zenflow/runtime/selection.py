"""A weight's chosen channels over time."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.core.selection import AUTO_INTERVAL_MIN, next_interval
from zenflow.runtime import device_ops
from zenflow.runtime.platform import Platform
from zenflow.runtime.stages import staged


class Scored(NamedTuple):
    """A choice on its way from the device, and the energies behind it if they are to be logged."""

    step: int
    chosen: Transfer
    energies: Transfer | None


@dataclass(slots=True, eq=False)
class Selection:
    """A weight's chosen channels over time. Segments adopt a version each at a time of its own.

    Attributes:
        chosen: the latest choice, int64 ``[k]`` ascending.
        version: counts the choices.
        interval: steps between two scorings; adapts if ``auto``.
        due: the step from which the next gradient is scored.
        pending: choices on their way from the device.
    """

    chosen: Tensor
    interval: int
    auto: bool
    due: int
    version: int = 0
    pending: list[Scored] = field(default_factory=list)

    @classmethod
    def begin(cls, chosen: Tensor, interval: int | str, step: int, index: int) -> "Selection":
        """The first choice, made at ``step``; weights take turns by their ``index``."""
        auto = interval == "auto"
        first = AUTO_INTERVAL_MIN if isinstance(interval, str) else interval
        return cls(chosen, first, auto, step + first - index % first)

    @staged("zenflow.select")
    def score(self, platform: Platform, grad: Tensor, step: int, *, logged: bool) -> None:
        """Choose anew by this gradient; the choice arrives in a later step."""
        chosen, energies = score(platform, grad, self.chosen.numel(), logged=logged)
        after = platform.device.mark()
        sent = [
            None
            if tensor is None
            else platform.link.to_host(tensor, _target(platform, tensor), after)
            for tensor in (chosen, energies)
        ]
        assert sent[0] is not None
        self.pending.append(Scored(step, sent[0], sent[1]))
        self.due = step + self.interval

    def forget(self, step: int) -> None:
        """Drop a choice made at a step that is not applied; the next gradient is scored instead."""
        if self.pending and self.pending[-1].step == step:
            self.pending.pop()
            self.due = step

    def arrive(self, step: int) -> Scored | None:
        """Take the choice of an earlier step, if there is one; returns it."""
        if not self.pending or self.pending[0].step >= step:
            return None
        scored = self.pending.pop(0)
        chosen = scored.chosen.wait()
        if self.auto:
            changed = (~torch.isin(chosen, self.chosen)).sum().item() / chosen.numel()
            self.interval = next_interval(self.interval, changed)
            self.due = scored.step + self.interval
        self.chosen = chosen
        self.version += 1
        return scored


def score(
    platform: Platform, grad: Tensor, num: int, *, logged: bool
) -> tuple[Tensor, Tensor | None]:
    """On the device, the ``num`` channels that a gradient selects, and all energies if logged."""
    chosen = platform.device.empty((num,), torch.int64)
    energies = platform.device.empty((grad.shape[1],), torch.float32) if logged else None
    platform.device.run(
        device_ops.score, grad, platform.device_kernel, platform.reduce, chosen, energies
    )
    return chosen, energies


def _target(platform: Platform, source: Tensor) -> Tensor | None:
    return None if platform.link.shared else platform.storage.buffer(source.shape, source.dtype)
