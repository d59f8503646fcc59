"""When queued work takes effect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Effects = Literal["early", "late", "loose", "random"]
"""When queued work takes effect.

- ``"early"``: as it is issued. What it was told to wait for (``after``) goes first, nothing else.
- ``"late"``: when somebody waits for it, or for later work of the same queue.
- ``"loose"``: when somebody waits for it and for nothing else, as if copies and jobs overtook each
  other. The protocols promise order, so this asks for more than they do: that whoever reads
  something waits for that itself. Not for compute.
- ``"random"``: some time between the first and the last, drawn anew with each call of the runtime;
  compute in order, links and workers out of order.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When each kind of engine takes effect."""

    compute: Effects = "late"
    links: Effects = "late"
    workers: Effects = "late"
    seed: int = 0
    """Of ``"random"``."""


def policies(kinds: Sequence[Effects] = ("early", "late")) -> list[Policy]:
    """Every combination of ``kinds`` over compute, links and workers."""
    return [
        Policy(compute=compute, links=links, workers=workers)
        for compute in kinds
        for links in kinds
        for workers in kinds
        if compute != "loose"
    ]
