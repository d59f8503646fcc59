"""Real worker threads across a link between two memories, on a CPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from zenflow.backends.host_kernel import HostKernel
from zenflow.backends.ticket import FINISHED, Ticket, Transfer
from zenflow.config import ZenFlowConfig
from zenflow.runtime import platform as platforms
from zenflow.runtime.platform import Platform


class CopyLink:
    """Copies at once. So the host state is compact, and slots and staging come from the pool."""

    shared = False

    def to_host(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(source, target, after)

    def to_device(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        return self._copy(source, target, after)

    def _copy(self, source: Tensor, target: Tensor | None, after: Ticket) -> Transfer:
        assert target is not None
        assert target.shape == source.shape and target.dtype == source.dtype
        after.wait()
        target.copy_(source)
        return Transfer(target, source, FINISHED)


def use_platform(
    monkeypatch: pytest.MonkeyPatch,
    *,
    link: bool = False,
    kernel: type | None = None,
) -> list[Platform]:
    """Change parts of the CPU's platform; the result lists the platforms made from then on.

    Args:
        link: put a link between device and host memory.
        kernel: wraps the host kernel.
    """
    choose = platforms.choose_platform
    made: list[Platform] = []

    def changed(device: torch.device, config: ZenFlowConfig) -> Platform:
        platform = choose(device, config)
        if link:
            platform = dataclasses.replace(platform, link=CopyLink())
        if kernel is not None:
            wrapped: HostKernel = kernel(platform.kernel)
            platform = dataclasses.replace(platform, kernel=wrapped)
        made.append(platform)
        return platform

    monkeypatch.setattr("zenflow.optimizer.choose_platform", changed)
    return made
