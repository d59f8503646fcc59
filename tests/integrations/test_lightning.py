"""Lightning and Fabric, with nothing but the optimizer changed."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LR, OVERLAPPED, SYNCHRONOUS, assert_close, assert_same_bits, copies
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from zenflow import ZenFlowAdamW

lightning = pytest.importorskip("lightning")
from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    GradientAccumulationScheduler,
    ModelCheckpoint,
)

from zenflow.integrations.lightning import ZenFlowLightningCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]

Optimizer = torch.optim.Optimizer
STREAMED = {"stream_gradients": True}


@pytest.fixture(autouse=True)
def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


class Tiny(LightningModule):
    def __init__(self, optimizer: type[Optimizer], *, give_model: bool = False, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
        self.make = optimizer
        self.options = options | ({"model": self.net} if give_model else {})
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x).float().square().mean()

    def training_step(self, x: Tensor, _: int) -> Tensor:
        loss = self.loss(x)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x: Tensor, _: int) -> None:
        loss = self.loss(x)
        self.validated.append(loss.item())
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=LR, **self.options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Tiny):
    """Its own optimization, with clipping and accumulation by hand."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, x: Tensor, number: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = super().training_step(x, number)
        self.manual_backward(loss / 2)
        if number % 2:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss


def make_loader(count: int = 96) -> DataLoader:
    rows = list(torch.randn(count, 20, generator=torch.Generator().manual_seed(0)))
    return DataLoader(rows, batch_size=4)


def make_trainer(output: Path, *callbacks: Callback, **more: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "default_root_dir": output,
        "limit_val_batches": 2,
    }
    return Trainer(**(arguments | more), callbacks=list(callbacks))


def fit(module: Tiny, trainer: Trainer, checkpoint: Path | None = None) -> list[Tensor]:
    trainer.fit(module, make_loader(), make_loader(8), ckpt_path=checkpoint)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.close()
    return copies(module)


CASES: dict[str, tuple[type[Tiny], dict[str, Any]]] = {
    "plain": (Tiny, {}),
    "clipping by norm": (Tiny, {"gradient_clip_val": 0.05}),
    "clipping by value": (
        Tiny,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulation": (Tiny, {"accumulate_grad_batches": 5, "gradient_clip_val": 0.05}),
    "manual": (Manual, {}),
}


@pytest.mark.covers("Lightning", "clipping")
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_with_adamw(case: str, tmp_path: Path) -> None:
    kind, more = CASES[case]
    ours, plain = kind(ZenFlowAdamW, config=SYNCHRONOUS), kind(torch.optim.AdamW)
    assert_close(*[fit(module, make_trainer(tmp_path, **more)) for module in (ours, plain)])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


STREAMED_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping by norm": {"gradient_clip_val": 0.05},
    "accumulation": {"accumulate_grad_batches": 5, "gradient_clip_val": 0.05},
    "accumulation with a rest": {
        "accumulate_grad_batches": 3,
        "limit_train_batches": 11,
        "max_epochs": 2,
    },
    "evaluated while accumulating": {"accumulate_grad_batches": 3, "val_check_interval": 4},
}


@pytest.mark.covers("Lightning", "streaming capture", "several backward passes")
@pytest.mark.parametrize("case", STREAMED_CASES)
def test_streamed_it_trains_as_with_adamw(case: str, tmp_path: Path) -> None:
    """The callback says which backward pass is a step's last."""
    ours = Tiny(ZenFlowAdamW, config=SYNCHRONOUS | STREAMED)
    trainer = make_trainer(tmp_path, ZenFlowLightningCallback(), **STREAMED_CASES[case])
    plain = make_trainer(tmp_path, **STREAMED_CASES[case])
    assert_close(fit(ours, trainer), fit(Tiny(torch.optim.AdamW), plain))
    assert trainer.global_step == plain.global_step


@pytest.mark.covers("Lightning", "streaming capture")
@pytest.mark.parametrize("case", ["accumulation with a rest", "evaluated while accumulating"])
def test_streamed_gradients_have_the_same_bits(case: str, tmp_path: Path) -> None:
    results = []
    for more in (STREAMED, {"preview": False}):
        trainer = make_trainer(tmp_path, ZenFlowLightningCallback(), **STREAMED_CASES[case])
        results.append(fit(Tiny(ZenFlowAdamW, config=OVERLAPPED | more), trainer))
    assert_same_bits(*results)


class Endless(IterableDataset):
    """Rows of which nobody knows the number before they end."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(44, 20, generator=torch.Generator().manual_seed(0)))


class Fetching(Tiny):
    """Takes its batches by itself, so that the trainer learns late which is the last."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


ENDS: dict[str, tuple[type[Tiny], DataLoader, dict[int, int]]] = {
    "of no known length": (Tiny, DataLoader(Endless(), batch_size=4), {0: 4}),
    "fetched by the module": (Fetching, make_loader(), {0: 5}),
    "scheduled": (Tiny, make_loader(), {0: 4, 1: 3}),
}


@pytest.mark.covers("Lightning", "streaming capture", "several backward passes")
@pytest.mark.parametrize("how", ENDS)
def test_streamed_accumulation_ends_where_the_trainers_does(how: str, tmp_path: Path) -> None:
    kind, loader, accumulation = ENDS[how]
    results = []
    for module in (
        kind(ZenFlowAdamW, config=SYNCHRONOUS | STREAMED),
        kind(torch.optim.AdamW),
    ):
        callbacks = [GradientAccumulationScheduler(accumulation), ZenFlowLightningCallback()]
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=2, limit_val_batches=0)
        trainer.fit(module, loader)
        if isinstance(trainer.optimizers[0], ZenFlowAdamW):
            trainer.optimizers[0].close()
        results.append((trainer.global_step, copies(module)))
    (steps, weights), (expected_steps, expected) = results
    assert steps == expected_steps
    assert_close(weights, expected)


REFUSED: dict[str, tuple[type[Tiny], bool, dict[str, Any]]] = {
    "accumulation without the callback": (Tiny, False, {"accumulate_grad_batches": 2}),
    "clipping by value": (Tiny, True, CASES["clipping by value"][1]),
    "manual optimization": (Manual, True, {}),
}


@pytest.mark.covers("Lightning", "streaming capture")
@pytest.mark.parametrize("case", REFUSED)
def test_what_streaming_cannot_honour_names_the_remedy(case: str, tmp_path: Path) -> None:
    kind, callback, more = REFUSED[case]
    trainer = make_trainer(tmp_path, *[ZenFlowLightningCallback()] * callback, **more)
    message = r"clip_grad_norm_.*optimizer\.accumulate.*ZenFlowLightningCallback"
    with pytest.raises(RuntimeError, match=message):
        fit(kind(ZenFlowAdamW, config=OVERLAPPED | STREAMED), trainer)


@pytest.mark.covers("Lightning", "streaming capture")
def test_manual_optimization_streams_when_it_says_what_it_accumulates(tmp_path: Path) -> None:
    class Saying(Manual):
        def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
            first = len(self.losses) % 2 == 1
            with self.optimizers().accumulate() if first else nullcontext():
                super().manual_backward(loss, *arguments, **options)

    ours = Saying(ZenFlowAdamW, config=SYNCHRONOUS | STREAMED)
    weights = fit(ours, make_trainer(tmp_path, ZenFlowLightningCallback()))
    assert_close(weights, fit(Manual(torch.optim.AdamW), make_trainer(tmp_path)))


@pytest.mark.covers("Lightning", "streaming capture")
def test_a_backward_pass_that_fails_while_accumulating_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    class Failing(Tiny):
        fail = True

        def on_before_optimizer_step(self, *_: Any) -> None:
            kinds.append(type(self.net[0].weight.grad).__name__)

        def training_step(self, x: Tensor, number: int) -> Tensor:
            loss = super().training_step(x, number)
            if self.fail:
                loss.register_hook(lambda _: 1 / 0)
            return loss

    kinds: list[str] = []
    module = Failing(ZenFlowAdamW, config=OVERLAPPED | STREAMED)
    callback = ZenFlowLightningCallback()
    with pytest.raises(ZeroDivisionError):
        fit(module, make_trainer(tmp_path, callback, accumulate_grad_batches=2))
    module.fail = False
    fit(module, make_trainer(tmp_path, callback))
    assert set(kinds) == {"TakenGradient"}


@pytest.mark.covers("Lightning")
def test_autocast_trains_as_with_adamw(tmp_path: Path) -> None:
    ours, plain = Tiny(ZenFlowAdamW, config=SYNCHRONOUS), Tiny(torch.optim.AdamW)
    trained = [fit(m, make_trainer(tmp_path, precision="bf16-mixed")) for m in (ours, plain)]
    assert_close(*trained, atol=1e-3)  # roundings to bf16 differ where fp32 differs by one rounding


@pytest.mark.covers("Lightning", "resume")
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("callback", [True, False], ids=["callback", "no callback"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    config: dict[str, Any], callback: bool, tmp_path: Path
) -> None:
    """Saved after 11 steps, the end of an epoch: Lightning begins a cut epoch with its first batch."""
    results = []
    for checkpoint in (None, tmp_path / "epoch=0.ckpt"):
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [saving, *[ZenFlowLightningCallback()] * callback]
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=2, limit_train_batches=11)
        results.append(fit(Tiny(ZenFlowAdamW, config=config), trainer, checkpoint))
        assert trainer.global_step == 22
    assert_same_bits(*results)


@pytest.mark.covers("Lightning", "exported weights", "pending steps")
@pytest.mark.parametrize("how", ["callback", "model given", "nothing but the optimizer"])
def test_weights_are_current_when_evaluated_and_saved(how: str, tmp_path: Path) -> None:
    """The loss that was validated is the one of the weights that were saved then."""
    module = Tiny(ZenFlowAdamW, config=OVERLAPPED, give_model=how == "model given")
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, monitor="val_loss")
    callbacks = [saving, *[ZenFlowLightningCallback()] * (how == "callback")]
    trainer = make_trainer(
        tmp_path, *callbacks, max_epochs=3, num_sanity_val_steps=0, limit_train_batches=10
    )
    fit(module, trainer)
    assert len(module.validated) == 6
    for epoch in range(3):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        other = Tiny(torch.optim.AdamW)
        other.load_state_dict(saved["state_dict"])
        losses = [other.loss(x).item() for x in make_loader(8)]
        assert losses == pytest.approx(module.validated[2 * epoch : 2 * epoch + 2], rel=1e-6)


@pytest.mark.covers("Lightning")
def test_the_wrapped_optimizer_still_answers(tmp_path: Path) -> None:
    """In manual optimization a user holds Lightning's wrapper."""
    lags: list[tuple[int, int]] = []

    class Asking(Manual):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.optimizers()
            before = optimizer.stats.staleness_steps
            optimizer.synchronize()
            lags.append((before, optimizer.stats.staleness_steps))

    fit(Asking(ZenFlowAdamW, config=OVERLAPPED), make_trainer(tmp_path))
    assert max(before for before, _ in lags) > 0
    assert all(after == 0 for _, after in lags)


# Fabric


class FabricRun:
    def __init__(self, optimizer: type[Optimizer], **options: Any) -> None:
        torch.manual_seed(0)
        self.fabric = Fabric(accelerator="cpu", devices=1)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
        inner = optimizer(model.parameters(), lr=LR, **options)
        self.inner = inner
        self.model, self.optimizer = self.fabric.setup(model, inner)
        self.loader = self.fabric.setup_dataloaders(make_loader())

    def train(
        self,
        clip: dict[str, float] | None = None,
        every: int = 1,
        skip: int = 0,
        stop: int = 24,
        *,
        say: bool = False,
    ) -> None:
        """With ``say``, the optimizer is told which backward passes accumulate."""
        for number, x in enumerate(self.loader):
            if not skip <= number < stop:
                continue
            last = number % every == every - 1
            with (
                self.fabric.no_backward_sync(self.model, enabled=not last),
                self.optimizer.accumulate() if say and not last else nullcontext(),
            ):
                self.fabric.backward((self.model(x) - x).square().mean() / every)
            if last:
                if clip is not None:
                    self.fabric.clip_gradients(self.model, self.optimizer, **clip)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        if isinstance(self.inner, ZenFlowAdamW):
            self.inner.close()
        return copies(self.model)


@pytest.mark.covers("Fabric", "clipping")
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}, {"clip_val": 0.01}])
@pytest.mark.parametrize("every", [1, 3])
def test_fabric_trains_as_with_adamw(clip: dict[str, float] | None, every: int) -> None:
    runs = [FabricRun(ZenFlowAdamW, config=SYNCHRONOUS), FabricRun(torch.optim.AdamW)]
    for run in runs:
        run.train(clip, every)
    assert_close(*[run.weights() for run in runs])


@pytest.mark.covers("Fabric", "clipping", "streaming capture", "several backward passes")
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}])
@pytest.mark.parametrize("every", [1, 3])
def test_fabric_streams_as_adamw_trains(clip: dict[str, float] | None, every: int) -> None:
    ours = FabricRun(ZenFlowAdamW, config=SYNCHRONOUS | STREAMED)
    ours.train(clip, every, say=True)
    plain = FabricRun(torch.optim.AdamW)
    plain.train(clip, every)
    assert_close(ours.weights(), plain.weights())


@pytest.mark.covers("Fabric", "streaming capture")
def test_fabrics_no_backward_sync_alone_is_refused_with_the_remedy() -> None:
    """On one device it does nothing that could be noticed."""
    run = FabricRun(ZenFlowAdamW, config=OVERLAPPED | STREAMED)
    with pytest.raises(RuntimeError, match=r"with optimizer\.accumulate"):
        run.train(every=2)
    run.weights()


@pytest.mark.covers("Fabric", "resume")
@pytest.mark.parametrize("config", [SYNCHRONOUS, OVERLAPPED], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("at", [1, 8, 11])
def test_fabric_resumes_with_the_same_bits(config: dict[str, Any], at: int, tmp_path: Path) -> None:
    whole = FabricRun(ZenFlowAdamW, config=config)
    whole.train(stop=at)
    whole.fabric.save(tmp_path / "saved.ckpt", {"model": whole.model, "optimizer": whole.optimizer})
    whole.train(skip=at)
    resumed = FabricRun(ZenFlowAdamW, config=config)
    resumed.fabric.load(
        tmp_path / "saved.ckpt", {"model": resumed.model, "optimizer": resumed.optimizer}
    )
    resumed.train(skip=at)
    assert_same_bits(resumed.weights(), whole.weights())


@pytest.mark.covers("Fabric")
def test_fabrics_wrapper_still_answers() -> None:
    run = FabricRun(ZenFlowAdamW, config=OVERLAPPED)
    run.train()
    assert run.optimizer.stats.staleness_steps > 0
    run.optimizer.synchronize()
    assert run.optimizer.stats.staleness_steps == run.inner.stats.staleness_steps == 0
    run.weights()
