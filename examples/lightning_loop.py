"""Lightning. Two lines belong to ZenFlow: the optimizer, and a callback.

The callback applies every gradient before each evaluation and save.
"""

import logging
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zenflow import ZenFlowAdamW
from zenflow.integrations.lightning import ZenFlowLightningCallback


class Sums(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return ZenFlowAdamW(self.parameters(), lr=1e-2)


def make_loader(count: int, seed: int) -> DataLoader:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.cumsum(1)), batch_size=16)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice on data loading
    torch.manual_seed(0)
    module = Sums()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=4,
            accelerator="cpu",
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            callbacks=[ZenFlowLightningCallback(), ModelCheckpoint(folder, monitor="val_loss")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, make_loader(1600, seed=0), make_loader(64, seed=1))
        print(f"trained: {trainer.callback_metrics['val_loss']:.4f}")
        # To resume: trainer.fit(module, ..., ckpt_path=path)
        path = trainer.checkpoint_callback.best_model_path
        weights = torch.load(path, weights_only=True)["state_dict"]
    saved = Sums()
    saved.load_state_dict(weights)
    losses = [nn.functional.mse_loss(saved.net(x), y) for x, y in make_loader(64, seed=1)]
    print(f"saved: {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    main()
