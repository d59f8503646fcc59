"""The held-out loss: what it is, and the file from which anyone can compute it again.

``heldout.jsonl`` has one token sequence a line: ``{"input_ids": [...], "labels": [...]}``, labels
as in transformers (-100 is not counted; each is predicted from the tokens before it). The loss is
the mean over all counted tokens of all sequences, in nats::

    model, tokenizer = AutoModelForCausalLM.from_pretrained(DIR), ...
    mean_token_loss(model, read_heldout(DIR / "heldout.jsonl"))
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELDOUT_NAME = "heldout.jsonl"
_IGNORED = -100

TokenRow = dict[str, list[int]]
"""``input_ids`` and ``labels``, of equal length."""


def write_heldout(path: Path, rows: Iterable[TokenRow]) -> None:
    """Write token sequences, one a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_heldout(path: Path) -> list[TokenRow]:
    """The token sequences of a ``heldout.jsonl``."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@torch.no_grad()
def mean_token_loss(
    model: "PreTrainedModel", rows: Sequence[TokenRow], batch_size: int = 8
) -> float:
    """Mean next-token loss (nats) over the counted tokens of all rows; leaves the model's mode.

    Args:
        model: a causal language model.
        rows: token sequences with labels.
        batch_size: sequences in a forward pass; it changes nothing but rounding.
    """
    training = model.training
    model.eval()
    total = 0.0
    count = 0
    for start in range(0, len(rows), batch_size):
        batch = _pad(rows[start : start + batch_size], model.device)
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=_IGNORED,
            reduction="sum",
        )
        total += loss.item()
        count += int((labels != _IGNORED).sum())
    model.train(training)
    return total / count if count else float("nan")


def _pad(rows: Sequence[TokenRow], device: torch.device) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": _IGNORED}
    padded: dict[str, list[list[int]]] = {name: [] for name in fill}
    for row in rows:
        full = {**row, "attention_mask": [1] * len(row["input_ids"])}
        for name, value in fill.items():
            padded[name].append(full[name] + [value] * (longest - len(full[name])))
    return {name: torch.tensor(value, device=device) for name, value in padded.items()}
