"""One training session: a trainer built, run, its model saved and its figures taken."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, TrainerState
from trl import SFTTrainer

from zenflow.cli.errors import Interrupted, RunError, UsageError
from zenflow.cli.finetune.callbacks import KeeperCallback, ProgressCallback
from zenflow.cli.finetune.heldout import HELDOUT_NAME, TokenRow, mean_token_loss, write_heldout
from zenflow.cli.finetune.outputs import OutputDir
from zenflow.cli.finetune.plan import Plan
from zenflow.cli.finetune.samples import choose_prompt, continue_prompt
from zenflow.cli.finetune.stopping import StopRequest
from zenflow.cli.finetune.summary import losses, peak_host_bytes
from zenflow.cli.finetune.trainer import build_trainer, total_steps
from zenflow.integrations.transformers import RunTotals, ZenFlowCallback, unwrap_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Session:
    """A trainer with its callbacks, from the start or from a checkpoint on.

    Args:
        plan: the run.
        output: where checkpoints go.
        model: the model to train; moved to the plan's device.
        tokenizer: its tokenizer.

    Raises:
        UsageError: if the data leaves nothing to train on or to hold out.
    """

    def __init__(
        self,
        plan: Plan,
        output: OutputDir,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.stop = StopRequest()
        earlier = dict(plan.checkpoint.totals) if plan.checkpoint else {"tokens": 0}
        tokens = int(earlier.pop("tokens"))
        self.zenflow = ZenFlowCallback(RunTotals(**earlier))
        self.progress = ProgressCallback(self.zenflow, tokens)
        # The keeper asks for saves, so it stands before the callback that drains for them.
        keeper = KeeperCallback(self.stop, self._totals)
        self.trainer: SFTTrainer = build_trainer(
            plan.settings,
            model=model,
            tokenizer=tokenizer,
            train=plan.train,
            heldout=plan.heldout,
            device=plan.device,
            checkpoints=output.checkpoints,
            selection_log=output.selection_log,
            callbacks=[keeper, self.zenflow, self.progress],
        )
        for name, dataset in (
            ("train on", self.trainer.train_dataset),
            ("hold out", self.trainer.eval_dataset),
        ):
            if len(dataset) == 0:
                raise UsageError(f"nothing left to {name} within --max-length tokens; raise it")
        self.prompt = choose_prompt(plan.settings.prompt, plan.heldout, tokenizer)

    def measure(self) -> tuple[float, str]:
        """Held-out loss and sample of the model as it is."""
        settings, model = self.plan.settings, self.trainer.model
        loss = mean_token_loss(model, self._heldout(), settings.batch_size)
        return loss, continue_prompt(model, self.tokenizer, self.prompt, settings.max_length)

    def is_complete(self) -> bool:
        """Whether the checkpoint to continue from is already at the run's last step."""
        checkpoint = self.plan.checkpoint
        return checkpoint is not None and checkpoint.step >= total_steps(
            self.plan.settings, self.trainer
        )

    def train(self) -> None:
        """Train to the end. What the optimizer holds is applied and freed, whatever happens.

        Raises:
            Interrupted: after a signal; a checkpoint is saved.
            RunError: if no step could be applied.
        """
        checkpoint = self.plan.checkpoint
        if checkpoint is not None and self.is_complete():
            # Nothing is left but to publish; the trainer would make one step too many.
            self._restore(checkpoint.path)
            return
        try:
            with self.stop:
                self.trainer.train(
                    resume_from_checkpoint=str(checkpoint.path) if checkpoint else None
                )
        finally:
            optimizer = unwrap_optimizer(self.trainer.optimizer)
            if optimizer is not None:
                optimizer.close()
        if self.stop.signal_number is not None:
            raise Interrupted(
                f"interrupted at step {self.trainer.state.global_step}", self.stop.signal_number
            )
        totals = self.zenflow.totals
        if totals.skipped_steps == totals.steps:
            raise RunError(f"all {totals.steps} steps were skipped: no gradient was finite")

    def save(self, staged: Path) -> None:
        """Write the model, its tokenizer and the held-out sequences into a directory."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        model.save_pretrained(staged)
        self.tokenizer.save_pretrained(staged)
        write_heldout(staged / HELDOUT_NAME, self._heldout())

    def figures(self) -> dict[str, Any]:
        """The fields of :class:`Summary` that training determines."""
        totals, last = self.zenflow.totals, self.zenflow.last
        loss_first, loss_last = losses(self.trainer.state.log_history)
        return {
            "loss_first": loss_first,
            "loss_last": loss_last,
            "tokens_per_s": self.progress.tokens / totals.loop_s if totals.loop_s else 0.0,
            "stall_fraction": totals.stall_fraction,
            "traffic_model_sizes": totals.traffic_per_step,
            "staleness_max": totals.staleness_max_steps,
            "peak_host_bytes": peak_host_bytes(),
            "steps": self.trainer.state.global_step,
            "skipped_steps": totals.skipped_steps,
            "tokens": self.progress.tokens,
            "loop_s": totals.loop_s,
            "drain_s": totals.drain_s,
            "update_interval_last": None if last is None else last.update_interval,
        }

    def _restore(self, checkpoint: Path) -> None:
        saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        self.trainer.model.load_state_dict(saved.state_dict())
        state = checkpoint / "trainer_state.json"
        self.trainer.state = TrainerState.load_from_json(str(state))

    def _totals(self) -> dict[str, Any]:
        return {"tokens": self.progress.tokens, **self.zenflow.totals.to_dict()}

    def _heldout(self) -> list[TokenRow]:
        dataset = self.trainer.eval_dataset
        return [{name: row[name] for name in ("input_ids", "labels")} for row in dataset]
