"""A plain PyTorch loop. Two lines belong to ZenFlow: the optimizer, and ``synchronize()``."""

import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import zenflow

STEPS = 300


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def make_optimizer(model: nn.Module) -> zenflow.ZenFlowAdamW:
    # return torch.optim.AdamW(model.parameters(), lr=3e-3)
    return zenflow.ZenFlowAdamW(model.parameters(), lr=3e-3, config={"update_interval": 2})


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), torch.sin(x))


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, torch.linspace(-math.pi, math.pi, 101).unsqueeze(1)).item()
    model.train()
    return loss


def main() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    print(f"before: {evaluate(model):.4f}")

    for step in range(1, STEPS + 1):
        x = (torch.rand(64, 1) * 2 - 1) * math.pi
        loss_of(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            optimizer.synchronize()  # before evaluating or saving: apply every gradient so far
            print(f"step {step}: {evaluate(model):.4f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], path)
        saved = torch.load(path, weights_only=True)
    optimizer.close()  # or leave it to the end of the process

    # To resume: build everything as before, then load.
    resumed = make_model()
    optimizer = make_optimizer(resumed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for each, state in zip((resumed, optimizer, schedule), saved, strict=True):
        each.load_state_dict(state)
    print(f"resumed: {evaluate(resumed):.4f}")
    optimizer.close()


if __name__ == "__main__":
    main()
