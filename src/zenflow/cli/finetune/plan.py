"""What a run will do, decided before anything is loaded or written."""

from dataclasses import dataclass, replace

import torch

from zenflow.cli.errors import UsageError
from zenflow.cli.finetune import models
from zenflow.cli.finetune.checkpoints import Checkpoint, newest_whole
from zenflow.cli.finetune.data import digest, read_rows, split_heldout
from zenflow.cli.finetune.outputs import OutputDir, RunRecord
from zenflow.cli.finetune.rows import Rows
from zenflow.cli.finetune.settings import Settings
from zenflow.cli.finetune.sources import Source, find_data, find_model, go_offline_if_possible


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run whose inputs are found, read and checked; the model is not loaded yet."""

    settings: Settings
    model: Source
    device: torch.device
    dtype: torch.dtype
    train: Rows
    heldout: Rows
    data_digest: str
    checkpoint: Checkpoint | None
    """The checkpoint to continue from; None for a new run."""


def make_plan(settings: Settings, output: OutputDir, record: RunRecord | None) -> Plan:
    """Find and read all inputs.

    Args:
        settings: what to do.
        output: where the checkpoints of a run to resume lie.
        record: of the run to resume; None for a new one.

    Raises:
        UsageError: for whatever is missing, malformed or changed.
    """
    model = find_model(settings.model)
    data = find_data("--data", settings.data)
    eval_data = find_data("--eval-data", settings.eval_data)
    device = models.choose_device(settings.device)
    dtype = models.choose_dtype(settings.dtype, device)
    checkpoint = None if record is None else _find_checkpoint(output)
    go_offline_if_possible(model, data, eval_data)
    train, heldout = _read_data(settings, data, eval_data)
    data_digest = digest(train.rows + heldout.rows)
    if record is not None and record.data_digest != data_digest:
        raise UsageError(f"the data has changed since the run in {output.path} began")
    return Plan(
        settings=settings,
        model=model,
        device=device,
        dtype=dtype,
        train=train,
        heldout=heldout,
        data_digest=data_digest,
        checkpoint=checkpoint,
    )


def _read_data(settings: Settings, data: Source, eval_data: Source) -> tuple[Rows, Rows]:
    rows = read_rows(data)
    if settings.eval_data is None:
        train, heldout = split_heldout(rows.rows, settings.eval_fraction, settings.seed)
        return replace(rows, rows=train), replace(rows, rows=heldout)
    heldout_rows = read_rows(eval_data)
    if heldout_rows.form != rows.form:
        raise UsageError(f"--eval-data has the {heldout_rows.form} form, --data {rows.form}")
    return rows, heldout_rows


def _find_checkpoint(output: OutputDir) -> Checkpoint:
    checkpoint = newest_whole(output.checkpoints)
    if checkpoint is None:
        raise UsageError(
            f"nothing to resume in {output.path}: no whole checkpoint; "
            "start again, with --overwrite if need be"
        )
    return checkpoint
