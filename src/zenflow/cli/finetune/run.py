"""The course of a run: plan, load, train, verify what was saved, publish."""

import gc
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zenflow.cli.errors import Interrupted, RunError, UsageError
from zenflow.cli.finetune import models
from zenflow.cli.finetune.checkpoints import discard_broken, newest_whole
from zenflow.cli.finetune.heldout import HELDOUT_NAME, mean_token_loss, read_heldout
from zenflow.cli.finetune.outputs import OutputDir, RunRecord, require_space
from zenflow.cli.finetune.plan import Plan, make_plan
from zenflow.cli.finetune.samples import continue_prompt
from zenflow.cli.finetune.settings import Settings
from zenflow.cli.finetune.summary import Summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zenflow.cli.finetune.session import Session


def finetune(
    settings: Settings,
    output: OutputDir,
    *,
    record: RunRecord | None = None,
    overwrite: bool = False,
    debug: bool = False,
) -> Summary:
    """Fine-tune a model and leave it, with its figures, in the output directory.

    Args:
        settings: what to do.
        output: where.
        record: of the run to resume; None for a new one.
        overwrite: whether an earlier run in `output` may be replaced.
        debug: whether the libraries may log.

    Raises:
        CliError: with one line for the user.
    """
    output.check(resume=record is not None, overwrite=overwrite)
    plan = make_plan(settings, output, record)
    from zenflow.cli.finetune.session import Session
    from zenflow.cli.finetune.trainer import quiet_libraries

    if not debug:
        quiet_libraries()
    checkpoint = plan.checkpoint.path if plan.checkpoint else None
    torch.manual_seed(settings.seed)  # of the built-in model's weights
    tokenizer = models.load_tokenizer(plan.model, plan.train, checkpoint)
    model = models.load_model(settings, plan.model, tokenizer, plan.dtype)
    require_space(output.path, models.disk_bytes(model, checkpoints=settings.save_every > 0))
    print(_description(plan, model, output), flush=True)
    about = _about(plan, model)
    record = _begin(plan, output, record)
    with _tidy(output), output.staging() as staged:
        session = Session(plan, output, model, tokenizer)
        del model  # so that it is freed with the session
        about |= _train(session, output, record, staged)
        del session
        gc.collect()
        summary = _verify(plan, about, staged)
        output.publish(staged, summary.to_json(settings.to_json()))
    print(summary.table(str(output.path)))
    return summary


def _begin(plan: Plan, output: OutputDir, record: RunRecord | None) -> RunRecord:
    """Take the directory, or tidy it for going on."""
    stored = plan.settings.to_json()
    if record is None:
        record = RunRecord(settings=stored, data_digest=plan.data_digest)
        output.claim(record)
        return record
    for name in discard_broken(output.checkpoints):
        print(f"deleted {name}: it was not whole")
    record = replace(record, settings=stored)
    output.write_record(record)
    return record


def _train(
    session: "Session", output: OutputDir, record: RunRecord, staged: Path
) -> dict[str, Any]:
    """Train, save into `staged`; the fields of the summary known so far."""
    if session.plan.checkpoint is None:
        heldout_loss, sample = session.measure()
        if not math.isfinite(heldout_loss):
            raise RunError("the model's held-out loss is not finite, before any training")
        record = replace(record, heldout_loss_before=heldout_loss, sample_before=sample)
        output.write_record(record)
    elif session.is_complete() and output.is_finished():
        raise UsageError(
            f"the run in {output.path} is finished; to train on, give a larger --max-steps"
        )
    session.train()
    session.save(staged)
    return {
        **session.figures(),
        "heldout_loss_before": record.heldout_loss_before,
        "prompt": session.prompt,
        "sample_before": record.sample_before,
    }


def _verify(plan: Plan, about: dict[str, Any], staged: Path) -> Summary:
    """Load the saved model as its user will, and measure it.

    Raises:
        RunError: if its loss is not a number.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(staged, dtype="auto").to(plan.device)
    rows = read_heldout(staged / HELDOUT_NAME)
    loss = mean_token_loss(model, rows, plan.settings.batch_size)
    if not (math.isfinite(loss) and math.isfinite(about["loss_last"])):
        raise RunError("training diverged: the loss is not finite; no model saved, lower --lr")
    sample = continue_prompt(
        model, AutoTokenizer.from_pretrained(staged), about["prompt"], plan.settings.max_length
    )
    return Summary(**about, heldout_loss=loss, sample_after=sample)


@contextmanager
def _tidy(output: OutputDir) -> Iterator[None]:
    """On failure leave whole checkpoints only, say how to go on from them, or leave nothing."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        discard_broken(output.checkpoints)
        output.abandon()
        newest = newest_whole(output.checkpoints)
        if newest is None or not isinstance(error, (RunError, Interrupted, KeyboardInterrupt)):
            raise
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        message = (
            f"{what}; checkpoint-{newest.step} is saved, continue with: "
            f"zenflow finetune --output {shlex.quote(str(output.path))} --resume"
        )
        if isinstance(error, RunError):
            raise RunError(message) from error
        number = error.exit_code - 128 if isinstance(error, Interrupted) else 2
        raise Interrupted(message, number) from error


def _about(plan: Plan, model: "PreTrainedModel") -> dict[str, Any]:
    return {
        "optimizer": plan.settings.optimizer,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
        "resumed_from_step": plan.checkpoint.step if plan.checkpoint else None,
    }


def _description(plan: Plan, model: "PreTrainedModel", output: OutputDir) -> str:
    settings = plan.settings
    size = sum(p.numel() for p in model.parameters()) / 1e6
    name = settings.model
    if name is None:
        name = "built in; its weights start random, because none can be assumed offline"
    data = settings.data or "Python's documentation topics (pydoc_data.topics)"
    lines = [
        ("model", f"{name} ({size:.1f} M parameters, {plan.dtype} on {plan.device})"),
        ("data", f"{data} ({len(plan.train.rows)} rows, {len(plan.heldout.rows)} held out)"),
        ("optimizer", settings.optimizer),
        ("output", str(output.path)),
    ]
    if plan.checkpoint is not None:
        lines.append(("resuming", f"after step {plan.checkpoint.step}"))
    if plan.train.num_empty:
        lines.append(("note", f"{plan.train.num_empty} rows without text are left out"))
    return "\n".join(f"{label:<10} {value}" for label, value in lines)
