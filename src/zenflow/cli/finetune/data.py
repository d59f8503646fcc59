"""Reading training data: files, hub datasets and the built-in text, into checked rows."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zenflow.cli.errors import UsageError, one_line
from zenflow.cli.finetune.blocks import cut_text
from zenflow.cli.finetune.rows import Rows, check_rows
from zenflow.cli.finetune.sources import Source

_MAX_HELDOUT_ROWS = 500
_BUILTIN_BLOCK_CHARS = 2000

Placed = Iterator[tuple[str, object]]


def read_rows(source: Source) -> Rows:
    """Read and check all rows of a data source.

    Raises:
        UsageError: naming file and line of what is malformed or missing.
    """
    if source.value is None:
        return check_rows("the built-in text", _builtin_rows())
    if source.local is None:
        return check_rows(source.value, _hub_rows(source))
    reader = _READERS.get(source.local.suffix.lower())
    if reader is None:
        raise UsageError(f"{source.value}: not one of {', '.join(_READERS)}")
    try:
        return check_rows(source.value, reader(source.local))
    except OSError as error:
        raise UsageError(f"cannot read {source.value}: {one_line(error)}") from error


def split_heldout(rows: list[Any], fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Rows to train on and rows held out: a share of them drawn by the seed, 1 to 500.

    Raises:
        UsageError: if there is only one row.
    """
    if len(rows) < 2:
        raise UsageError(
            "the data has one row only, and one is held out; give more, or --eval-data"
        )
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1, _MAX_HELDOUT_ROWS)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [rows[index] for index in sorted(chosen)]


def digest(rows: list[dict[str, Any]]) -> str:
    """A fingerprint of rows, to notice that the data of a resumed run has changed."""
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True).encode())
    return total.hexdigest()


def _builtin_rows() -> Placed:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("this Python ships without pydoc_data; give --data") from None
    for name in sorted(topics):
        for block in cut_text(topics[name], _BUILTIN_BLOCK_CHARS):
            yield name, {"text": block}


def _text_rows(path: Path) -> Placed:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    for block in cut_text(text):
        yield str(path), {"text": block}


def _jsonl_rows(path: Path) -> Placed:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield place, json.loads(text)
            except UnicodeDecodeError as error:
                raise UsageError(f"{place}: not UTF-8 text ({error.reason})") from None
            except json.JSONDecodeError as error:
                raise UsageError(
                    f"{place}: not JSON: {error.msg} at column {error.colno}"
                ) from None


def _parquet_rows(path: Path) -> Placed:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path}: not a readable parquet file: {one_line(error)}") from None


def _hub_rows(source: Source) -> Placed:
    import datasets

    try:
        loaded = datasets.load_dataset(source.value, split="train")
    except Exception as error:
        raise UsageError(
            f"cannot load {source.flag} {source.value}: there is no such file here, and the "
            f'"train" split of the hub dataset of that name failed: {one_line(error)}'
        ) from error
    for number, row in enumerate(loaded, 1):
        yield f"{source.value}: row {number}", row


_READERS: dict[str, Callable[[Path], Placed]] = {
    ".txt": _text_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}
