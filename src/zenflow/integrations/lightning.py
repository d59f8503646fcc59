"""ZenFlow inside Lightning's ``Trainer``.

The optimizer needs no more than to be returned by ``configure_optimizers``. What a trainer cannot
know is that some gradients still wait on the host when it evaluates or saves;
:class:`ZenFlowLightningCallback` applies them first.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from zenflow.optimizer import ZenFlowAdamW


class ZenFlowLightningCallback(Callback):
    """Makes the weights current before every evaluation and save, and at the end of training.

    Example::

        trainer = lightning.Trainer(..., callbacks=[ZenFlowLightningCallback()])
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From now on, the module's ``state_dict()``, which every checkpoint is made from, is
        current."""
        for optimizer in _ours(trainer):
            optimizer.train()

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
