"""When each segment is swept and how far its weights may lag: pure functions of integers.

Steps count applied steps from 1; a skipped step does not exist for the schedule.
Staleness is counted in steps behind AdamW: 0 means that the visible weights hold every gradient.
"""

from collections.abc import Sequence


def phases(numels: Sequence[int], update_interval: int) -> list[int]:
    """Phase in ``[0, update_interval)`` of each segment, in table order.

    A segment is due at the steps ``t`` with ``t % update_interval == phase``. Phases follow the
    running element count, so each step sweeps about ``1/update_interval`` of all elements.
    """
    total = sum(numels)
    before, result = 0, []
    for numel in numels:
        result.append((2 * before + numel) * update_interval // (2 * total))
        before += numel
    return result


def is_due(step: int, phase: int, update_interval: int, oldest: int, max_age: int) -> bool:
    """Whether a segment whose oldest waiting gradient is of step ``oldest`` is swept at ``step``.

    ``max_age`` bounds the wait when the interval grows in the middle of a window: a gradient is
    swept at the latest in the ``max_age``-th step that holds it.
    """
    return step % update_interval == phase or step - oldest + 1 >= max_age


def lookahead_steps(update_interval: int, overlap: bool) -> float:
    """Expected number of gradients that a published weight lacks while it is visible.

    Overlapped, a weight lacks 1 gradient right after its publish and S right before the next one:
    mean ``(S + 1) / 2``. Synchronous, 0 to S - 1: mean ``(S - 1) / 2``.
    """
    return (update_interval + 1) / 2 if overlap else (update_interval - 1) / 2


def max_staleness(max_update_interval: int, overlap: bool) -> int:
    """Largest number of steps that a visible weight can lag behind AdamW."""
    return max_update_interval if overlap else max_update_interval - 1


def most_buffers(phases: Sequence[int], update_interval: int, *, streaming: bool) -> int:
    """Most host buffers, slots and staging together, that segments of these phases use at once.

    At the end of step ``t`` a segment holds one slot for each step since its last sweep, and those that are
    due hold staging too, until the publish in the next step. Streaming, the next gradients come before
    that publish.
    """
    return max(
        (
            sum((t - phase - 1) % update_interval + 1 for phase in phases)
            + sum(phase == t for phase in phases)
            for t in range(update_interval)
        ),
        default=0,
    ) + (len(phases) if streaming else 0)
