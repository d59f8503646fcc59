"""What the command adds to the trainer's loop: stopping, sealing checkpoints, progress."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zenflow.cli.finetune.checkpoints import seal
from zenflow.cli.finetune.stopping import StopRequest
from zenflow.integrations.transformers import ZenFlowCallback


class KeeperCallback(TrainerCallback):
    """Stops and saves when asked to, and seals each checkpoint once it is whole.

    Has to stand before :class:`ZenFlowCallback`, which drains for the saves asked for here.

    Args:
        stop: says whether a signal has come.
        figures: the run's figures so far, to go on from when it is resumed.
    """

    def __init__(self, stop: StopRequest, figures: Callable[[], dict[str, Any]]) -> None:
        self._stop = stop
        self._figures = figures

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask the trainer to stop and save; have figures logged whenever it does either."""
        if self._stop.signal_number is not None:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save or control.should_training_stop:
            control.should_log = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seal the checkpoint just written."""
        assert args.output_dir is not None
        seal(Path(args.output_dir) / f"checkpoint-{state.global_step}", self._figures())


class ProgressCallback(TrainerCallback):
    """A bar with loss, tokens/s, stall, S and staleness; plain lines where there is no terminal.

    Args:
        zenflow: has the steps' figures.
        tokens: tokens trained on before, for a resumed run.
    """

    def __init__(self, zenflow: ZenFlowCallback, tokens: int = 0) -> None:
        self._zenflow = zenflow
        self._tokens_before = tokens
        self.tokens = tokens
        self._loss = math.nan
        self._bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}{postfix}]",
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the figures of the last steps."""
        logs = logs or {}
        if "num_tokens" in logs:
            self.tokens = self._tokens_before + int(logs["num_tokens"])
        if "loss" in logs:
            self._loss = logs["loss"]
            self._show(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def line(self) -> str:
        """The figures in one line."""
        totals, last = self._zenflow.totals, self._zenflow.last
        speed = self.tokens / totals.loop_s if totals.loop_s else 0.0
        line = f"loss {self._loss:.3f}  {speed:,.0f} tokens/s"
        if last is not None:
            line += (
                f"  stall {totals.stall_fraction:.1%}  S {last.update_interval}"
                f"  staleness {last.staleness_steps}"
            )
        if totals.skipped_steps:
            line += f"  skipped {totals.skipped_steps}"
        return line

    def _show(self, state: TrainerState) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self.line())
        else:
            print(f"{_gauge(state)} {self.line()}", file=sys.stderr, flush=True)


def _gauge(state: TrainerState, width: int = 20) -> str:
    done = round(width * state.global_step / max(state.max_steps, 1))
    steps = f"{state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
    return f"[{'#' * done}{'.' * (width - done)}] {steps}"
