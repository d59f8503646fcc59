"""Weights that somebody else has written between steps: noticed, and taken as they are."""

import logging
from collections.abc import Mapping

from torch import Tensor

from zenflow.kernels.selective import DeviceSide
from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.platform import Platform
from zenflow.runtime.resident import Resident, check_place, identity
from zenflow.runtime.weight import Weight

_log = logging.getLogger("zenflow")

_SYNCHRONOUS_AFTER_EDIT_STEPS = 16


class Edits:
    """Compares every parameter with what the runtime last left in it.

    Args:
        platform: what the parameters' state lies on.
        pipeline: what may have to be applied before an edited weight is read again.
        residents, weights: the engine's own, which grow.
    """

    def __init__(
        self,
        platform: Platform,
        pipeline: HostPipeline,
        residents: Mapping[Tensor, Resident],
        weights: Mapping[Tensor, Weight],
    ) -> None:
        self._platform = platform
        self._pipeline = pipeline
        self._residents = residents
        self._weights = weights
        self._changed = False

    def look(self) -> tuple[list[DeviceSide], list[DeviceSide]]:
        """Find the parameters that have another version or other memory, for :meth:`take`.

        Returns:
            What else could have been written, through ``param.data``: segments, by their
            fingerprints; and residents, which should be their masters, rounded.
        """
        self._changed = False
        watched: list[DeviceSide] = []
        rounded: list[DeviceSide] = []
        for resident in self._residents.values():
            if resident.side is None:
                continue
            if resident.seen != identity(resident.param):
                self._changed = True
            elif resident.has_master and not resident.restored:
                rounded.append(resident.side)
        for weight in self._weights.values():
            if weight.seen != identity(weight.param):
                self._changed = True
            elif weight.begun:
                watched.extend(weight.sides)
        return watched, rounded

    def mark_seen(self) -> None:
        """What the parameters hold now is the runtime's own."""
        for resident in self._residents.values():
            resident.seen = identity(resident.param)
        for weight in self._weights.values():
            weight.seen = identity(weight.param)

    def take(self, step: int, *, suspicious: bool = False, restored: bool = True) -> None:
        """Take the values of edited parameters for their masters, after :meth:`look`.

        Gradients so far then count in the moments only, as they would in AdamW. What is edited may be
        edited in every step (an embedding with ``max_norm``), so for some steps such a weight is
        published before ``step()`` returns, and the next edit finds it current.

        Args:
            step: applied steps so far.
            suspicious: some weight was written without a change of its version; look at each.
            restored: also compare parameters whose state was loaded with what it was saved for. Not
                yet, while the model itself may still be loaded.

        Raises:
            ValueError: if a parameter is of another size or on another device now.
        """
        if not (self._changed or suspicious):
            return
        for resident in self._residents.values():
            if resident.restored and not restored:
                continue
            if resident.changed_outside(self._platform, suspicious=suspicious):
                assert resident.state is not None
                check_place(resident.param, resident.state.exp_avg, resident.name)
                resident.reread(self._platform)
        for weight in self._weights.values():
            if weight.restored_checksum is not None and not restored:
                continue
            if weight.changed_outside(self._platform, suspicious=suspicious):
                self._take_weight(weight, step)
            elif not weight.begun and weight.seen != identity(weight.param):
                weight.follow()

    def _take_weight(self, weight: Weight, step: int) -> None:
        weight.follow()
        pending = self._pipeline.staleness_of(weight, step)
        if pending:
            _log.warning(
                "%s was changed outside of the optimizer: its new values are kept, and the updates "
                "of %d pending steps count in its moments only; call synchronize() before such a "
                "change",
                weight.name,
                pending,
            )
        self._pipeline.apply_unpublished(weight)
        weight.reread(self._platform)
        if weight.steps == 0:  # its first gradient was streamed: nothing can have lagged
            return
        for segment in weight.segments:
            segment.synchronous_until = step + _SYNCHRONOUS_AFTER_EDIT_STEPS
