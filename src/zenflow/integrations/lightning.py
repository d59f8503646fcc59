"""ZenFlow inside Lightning's ``Trainer``.

The optimizer needs no more than to be returned by ``configure_optimizers``. What a trainer cannot
know is that some gradients still wait on the host when it evaluates or saves;
:class:`ZenFlowLightningCallback` applies them first. With streamed gradients it also says which backward
pass is a step's last.
"""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from zenflow.optimizer import ZenFlowAdamW


class ZenFlowLightningCallback(Callback):
    """Makes the weights current before every evaluation and save, and at the end of training.

    With ``stream_gradients=True`` it honours the trainer's ``accumulate_grad_batches``. In manual
    optimization, accumulate by ``optimizer.accumulate()``.

    Example::

        trainer = lightning.Trainer(..., callbacks=[ZenFlowLightningCallback()])
    """

    def __init__(self) -> None:
        self._accumulates = False
        self._accumulating = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From now on, the module's ``state_dict()``, which every checkpoint is made from, is
        current."""
        for optimizer in _ours(trainer):
            optimizer.train()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look whether a step ends with this batch, as the trainer does."""
        is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        ends_step = is_last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self._accumulates = pl_module.automatic_optimization and not ends_step

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Leave gradients in place if more are to be added to them."""
        if self._accumulates:
            for optimizer in _ours(trainer):
                self._accumulating.enter_context(optimizer.accumulate())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The counterpart."""
        self._accumulating.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """A backward pass may have been left in the middle."""
        self._accumulating.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply what waits."""
        _synchronize(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply what waits."""
        _synchronize(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply what waits."""
        _synchronize(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply what still waits, so that the trained model is whole."""
        _synchronize(trainer)


def _ours(trainer: Any) -> list[ZenFlowAdamW]:
    return [each for each in trainer.optimizers if isinstance(each, ZenFlowAdamW)]


def _synchronize(trainer: Trainer) -> None:
    for optimizer in _ours(trainer):
        optimizer.synchronize()
