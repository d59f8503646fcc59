"""How much host memory the deferred channels take: numbers only."""

from collections.abc import Iterable
from typing import NamedTuple

STATE_BYTES = 12
"""fp32 master and two moments of one element."""


class HostNeed(NamedTuple):
    """Bytes of host memory, by what they hold."""

    state: int
    slots: int
    staging: int

    @property
    def total(self) -> int:
        return self.state + self.slots + self.staging


def host_need(deferred: Iterable[tuple[int, int]], update_interval: int) -> HostNeed:
    """Host memory for weights given as (elements held by the host, bytes of one weight element).

    Staggered windows hold between 1 and S gradients of a segment, (S + 1) / 2 on average; one in S
    segments has new weights in staging.
    """
    state = slots = staging = 0
    for numel, itemsize in deferred:
        state += numel * STATE_BYTES
        slots += numel * itemsize * (update_interval + 1) // 2
        staging += numel * itemsize // update_interval
    return HostNeed(state, slots, staging)
