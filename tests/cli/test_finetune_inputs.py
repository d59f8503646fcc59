"""What is wrong with the command line or the data is said in one line, before anything starts."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from finetune_helpers import Cli, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from zenflow.cli.finetune.blocks import cut_text
from zenflow.cli.finetune.data import read_rows, split_heldout
from zenflow.cli.finetune.sources import Source

GOOD = json.dumps({"text": "fine"}).encode()
MESSAGE = {"role": "user", "content": "hi"}

MALFORMED = {
    "broken JSON": (b'{"text": "a"}\n{"text": \n', "data.jsonl:2: not JSON"),
    "blank lines are counted": (b'{"text": "a"}\n\n\n{oops}\n', "data.jsonl:4: not JSON"),
    "not UTF-8": (GOOD + b'\n{"text": "\xff"}\n', "data.jsonl:2: not UTF-8"),
    "not an object": (GOOD + b"\n[1, 2]\n", "data.jsonl:2: expected an object"),
    "unknown columns": (b'{"body": "a"}\n', 'data.jsonl:1: expected "text"'),
    "column missing later": (GOOD + b'\n{"body": "a"}\n', 'data.jsonl:2: no "text"'),
    "prompt alone": (b'{"prompt": "a"}\n', 'data.jsonl:1: expected "text"'),
    "text is a number": (GOOD + b'\n{"text": 3}\n', 'data.jsonl:2: "text" must be text'),
    "text is null": (b'{"text": null}\n', 'data.jsonl:1: "text" must be text, found null'),
    "messages is text": (b'{"messages": "hi"}\n', 'data.jsonl:1: "messages" must be a list'),
    "message without role": (
        b'{"messages": [{"content": "hi"}]}\n',
        'data.jsonl:1: message 1 of "messages" needs "role"',
    ),
    "mixed prompt and completion": (
        json.dumps({"prompt": "a", "completion": [MESSAGE]}).encode(),
        "data.jsonl:1:",
    ),
    "no rows": (b"", "data.jsonl: no data in it"),
    "only blank lines": (b"\n\n", "data.jsonl: no data in it"),
    "only empty texts": (b'{"text": " "}\n', "data.jsonl: no text in it"),
    "one row": (GOOD, "one row only"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_jsonl_names_file_and_line(
    content: bytes, message: str, cli: Cli, tmp_path: Path, tiny_model: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(content)
    output = tmp_path / "out"
    result = cli("finetune", "--model", tiny_model, "--data", data, "--output", output)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("zenflow: error: ")
    assert message in result.err
    assert not output.exists()


def test_text_that_is_not_utf8_names_the_line(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_bytes(b"one\ntwo\n\xff\n")
    result = cli("finetune", "--data", data, "--output", tmp_path / "out")
    assert (result.code, "data.txt:3: not UTF-8" in result.err) == (2, True)


def test_empty_text_file(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text(" \n")
    result = cli("finetune", "--data", data, "--output", tmp_path / "out")
    assert (result.code, "data.txt: no text in it" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a", "b"]}, 'row 1: expected "text"'),
        ({"text": ["a", None]}, 'row 2: "text" must be text'),
        ({"text": pyarrow.array([], pyarrow.string())}, "no data in it"),
    ],
)
def test_malformed_parquet_names_file_and_row(
    columns: dict[str, object], message: str, cli: Cli, tmp_path: Path
) -> None:
    data = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), data)
    result = cli("finetune", "--data", data, "--output", tmp_path / "out")
    assert (result.code, f"data.parquet: {message}" in result.err) == (2, True)


def test_parquet_that_is_none(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    data.write_bytes(b"no parquet")
    result = cli("finetune", "--data", data, "--output", tmp_path / "out")
    assert (result.code, "not a readable parquet file" in result.err) == (2, True)


ROWS = {
    "text": [{"text": "a"}, {"text": "b"}],
    "prompt-completion": [{"prompt": "a", "completion": "b"}],
    "messages": [{"messages": [MESSAGE, {"role": "assistant", "content": "ho"}]}],
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("form", "rows"), ROWS.items())
def test_forms_are_read_by_their_columns(
    form: str, rows: list[dict[str, object]], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"data{suffix}"
    with_more = [{**row, "id": number} for number, row in enumerate(rows)]
    if suffix == ".jsonl":
        write_jsonl(path, with_more)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(with_more), path)
    read = read_rows(Source("--data", str(path), path))
    assert (read.form, read.rows) == (form, rows)


USAGE = {
    "no such model path": (["--model", "./nowhere"], "--model ./nowhere: no such"),
    "no such data file": (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such"),
    "model is no model": (["--model", "."], "it has no config.json"),
    "data is a directory": (["--data", "."], "is not a file"),
    "unknown data suffix": (["--data", "a.rst"], "not one of .txt, .jsonl, .parquet"),
    "topk_ratio too large": (["--topk-ratio", "1.5"], "'1.5' is not a number >= 0 and <= 1"),
    "interval of zero": (["--update-interval", "0"], "'0' is not an integer >= 1"),
    "lr is not a number": (["--lr", "fast"], "'fast' is not a number > 0"),
    "lr is NaN": (["--lr", "nan"], "'nan' is not a number > 0"),
    "unknown optimizer": (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
    "unknown flag": (["--learning-rate", "1"], "unrecognized arguments"),
    "abbreviated flag": (["--max-s", "1"], "unrecognized arguments"),
    "idle ZenFlow key": (
        ["--optimizer", "adamw", "--topk-ratio", "0.1"],
        "--topk-ratio has no effect with --optimizer adamw",
    ),
    "float16 on the CPU": (["--dtype", "float16", "--device", "cpu"], "needs an accelerator"),
    "resume of nothing": (["--resume", "--output", "nowhere"], "nothing to resume in nowhere"),
    "steps and epochs": (["--max-steps", "1", "--epochs", "1"], "not allowed with"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE.keys())
def test_wrong_usage_is_one_line(
    arguments: list[str],
    message: str,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.rst").write_text("text")
    result = cli("finetune", *arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("zenflow: error: ")
    assert message in result.err
    assert list(tmp_path.iterdir()) == [tmp_path / "a.rst"]


def test_help_is_grouped_and_gives_defaults(cli: Cli) -> None:
    result = cli("finetune", "--help")
    assert result.code == 0
    groups = ["model and data:", "output, checkpoints, resuming:", "training:", "optimizer:"]
    for group in [*groups, "ZenFlow:"]:
        assert f"\n{group}\n" in result.out
    for key in ("topk-ratio", "update-interval", "select-interval", "update-rule", "lookahead"):
        assert f"--{key}" in result.out


def test_top_level_help_names_the_command(cli: Cli) -> None:
    result = cli("--help")
    assert (result.code, "finetune" in result.out) == (0, True)


@given(st.text(alphabet="ab \n\r\u00e9", max_size=3000))
def test_blocks_joined_are_the_text(text: str) -> None:
    blocks = cut_text(text)
    assert "".join(blocks) == text
    assert all(blocks)


@given(st.integers(2, 3000), st.floats(0.001, 0.999), st.integers(0, 3))
def test_heldout_rows_are_few_and_not_trained_on(count: int, fraction: float, seed: int) -> None:
    train, heldout = split_heldout(list(range(count)), fraction, seed)
    assert sorted(train + heldout) == list(range(count))
    assert 1 <= len(heldout) <= 500
    assert train
    assert split_heldout(list(range(count)), fraction, seed) == (train, heldout)
