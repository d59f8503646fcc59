"""An Accelerate loop. One line belongs to ZenFlow.

``model=model`` in it makes ``model.state_dict()`` and a forward pass in evaluation mode apply every
gradient first. So nothing else is to be done before evaluating or saving.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zenflow import ZenFlowAdamW


def make_data(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.cumsum(1))


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    # optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    train = DataLoader(make_data(1600, seed=0), batch_size=16, shuffle=True)
    test = DataLoader(make_data(64, seed=1), batch_size=64)
    model, optimizer, schedule, train, test = accelerator.prepare(
        model, optimizer, schedule, train, test
    )

    for epoch in range(4):
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(x), y).item() for x, y in test]
        model.train()
        print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)  # the gradients that wait are in it
        accelerator.load_state(folder)
    optimizer.optimizer.close()  # Accelerate's wrapper holds ours


if __name__ == "__main__":
    main()
