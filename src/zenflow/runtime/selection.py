"""A weight's chosen channels over time."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.backends.ticket import Transfer
from zenflow.core.selection import AUTO_INTERVAL_MIN, next_interval
from zenflow.runtime import device_ops
from zenflow.runtime.platform import Platform
from zenflow.runtime.stages import staged


@dataclass(slots=True, eq=False)
class Selection:
    """A weight's chosen channels over time. Segments adopt a version each at a time of its own.

    Attributes:
        chosen: the latest choice, int64 ``[k]`` ascending.
        version: counts the choices.
        interval: steps between two scorings; adapts if ``auto``.
        due: the step from which the next gradient is scored.
        pending: choices on their way from the device, each with the step that it was made at.
    """

    chosen: Tensor
    interval: int
    auto: bool
    due: int
    version: int = 0
    pending: list[tuple[int, Transfer]] = field(default_factory=list)

    @classmethod
    def begin(cls, chosen: Tensor, interval: int | str, step: int, index: int) -> "Selection":
        """The first choice, made at ``step``; weights take turns by their ``index``."""
        auto = interval == "auto"
        first = AUTO_INTERVAL_MIN if isinstance(interval, str) else interval
        return cls(chosen, first, auto, step + first - index % first)

    @staged("zenflow.select")
    def score(self, platform: Platform, grad: Tensor, step: int) -> None:
        """Choose anew by this gradient; the choice arrives in a later step."""
        num = self.chosen.numel()
        chosen = platform.device.empty((num,), torch.int64)
        platform.device.run(device_ops.score, grad, platform.device_kernel, platform.reduce, chosen)
        target = None if platform.link.shared else platform.storage.buffer((num,), torch.int64)
        self.pending.append((step, platform.link.to_host(chosen, target, platform.device.mark())))
        self.due = step + self.interval

    def forget(self, step: int) -> None:
        """Drop a choice made at a step that is not applied; the next gradient is scored instead."""
        if self.pending and self.pending[-1][0] == step:
            self.pending.pop()
            self.due = step

    def arrive(self, step: int) -> None:
        """Take the choice of an earlier step, if there is one."""
        if not self.pending or self.pending[0][0] >= step:
            return
        scored, transfer = self.pending.pop(0)
        chosen = transfer.wait()
        if self.auto:
            changed = (~torch.isin(chosen, self.chosen)).sum().item() / chosen.numel()
            self.interval = next_interval(self.interval, changed)
            self.due = scored + self.interval
        self.chosen = chosen
        self.version += 1
