"""Deferred weights show a step's gradients, see :mod:`zenflow.core.preview`."""

from collections.abc import Mapping

from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.channels import channel_view
from zenflow.core.preview import SHARE
from zenflow.core.rules import SubStep
from zenflow.kernels.selective import Preview
from zenflow.runtime.platform import Platform
from zenflow.runtime.stages import staged
from zenflow.runtime.weight import Weight


class Previews:
    """Those of one step at a time.

    Attributes:
        share: of an update that is shown.
    """

    def __init__(self, platform: Platform, config: ZenFlowConfig) -> None:
        self.share = SHARE
        self._platform = platform
        self._wanted = config.shows_previews
        self._hypers: Mapping[Tensor, SubStep] = {}
        self._scale = 1.0
        self._waits = False
        self._shown: list[Preview] = []

    def begin(self, hypers: Mapping[Tensor, SubStep], scale: float, *, waits: bool) -> None:
        """A step whose gradients are scaled by ``scale`` beside their own scale.

        Args:
            waits: gradients of this step can wait; otherwise all are published before it ends.
        """
        self._hypers, self._scale, self._waits = hypers, scale, waits

    def add(self, weight: Weight, grad: Tensor) -> None:
        """A captured gradient. Across a link it is shown at once, so that its memory can go; where memory
        is shared, it stays as the slot, and all are shown together."""
        if not (self._wanted and self._waits):
            return
        hyper = self._hypers[weight.param]
        view = channel_view(grad)
        for segment in weight.segments:
            if segment.factors_at:
                assert segment.side is not None
                rows = segment.rows_of(view)
                scale = hyper.scale * self._scale
                self._shown.append(Preview(segment.side, rows, scale, hyper.lr * self.share))
        if not self._platform.link.shared:
            self.show()

    def show(self) -> None:
        """Move the weights."""
        shown, self._shown = self._shown, []
        if shown:
            self._move(shown)

    @staged("zenflow.preview")
    def _move(self, shown: list[Preview]) -> None:
        self._platform.device.run(self._platform.device_kernel.preview, shown)
