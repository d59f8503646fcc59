"""Whole runs of ``zenflow finetune`` on a tiny model: what they leave and what they report."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from finetune_helpers import Cli, summary_of, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from zenflow.cli.finetune.heldout import mean_token_loss, read_heldout

FIGURES = {
    *("loss_first", "loss_last", "heldout_loss", "tokens_per_s", "stall_fraction"),
    *("traffic_model_sizes", "staleness_max", "peak_host_bytes"),
}
TALK = [
    {"role": "user", "content": "What is the value of item 3?"},
    {"role": "assistant", "content": "It is 21."},
]
FORMS = {
    "text": {"text": "The value of item 3 is 21. It follows item 2."},
    "prompt and completion": {"prompt": "What is the value of item 3?", "completion": " 21."},
    "talk and completion": {"prompt": TALK[:1], "completion": TALK[1:]},
    "messages": {"messages": TALK},
}


def loss_by_hand(output: Path) -> float:
    """The held-out loss as transformers itself computes it, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(output)
    total, count = 0.0, 0
    for line in (output / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = {name: torch.tensor([ids]) for name, ids in json.loads(line).items()}
        counted = int((row["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(**row).loss.item() * counted if counted else 0.0
        count += counted
    return total / count


@pytest.mark.covers("exported weights", "zenflow finetune")
@pytest.mark.parametrize("optimizer", ["zenflow", "adamw", "zero-offload"])
def test_each_optimizer_trains_and_the_saved_model_has_the_reported_loss(
    optimizer: str, small: list[object], cli: Cli, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    result = cli(*small, "--max-steps", 12, "--optimizer", optimizer, "--output", output)
    assert result.code == 0, result.err
    summary = summary_of(output)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["heldout_loss"] < summary["heldout_loss_before"]
    assert summary["heldout_loss"] == pytest.approx(loss_by_hand(output), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(output)
    again = mean_token_loss(model, read_heldout(output / "heldout.jsonl"), batch_size=3)
    assert again == pytest.approx(summary["heldout_loss"], rel=1e-5)
    assert summary["optimizer"] == optimizer
    expected = {"zenflow": (0.5, 2.0), "adamw": (0.0, 0.0), "zero-offload": (1.5, 2.0)}
    low, high = expected[optimizer]
    assert low <= summary["traffic_model_sizes"] <= high
    assert (summary["staleness_max"] > 0) == (optimizer == "zenflow")


def test_bare_run_reports_all_figures_and_that_weights_start_random(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("finetune", "--max-steps", 3)
    assert result.code == 0, result.err
    assert "weights start random" in result.out
    assert "loss, first to last" in result.out
    assert "[####################] 3/3 loss" in result.err
    assert "staleness" in result.err
    summary = summary_of(Path("zenflow-output"))
    assert set(summary) >= FIGURES
    assert all(math.isfinite(summary[name]) for name in FIGURES)
    assert summary["tokens"] == 3 * 4 * 128
    assert summary["peak_host_bytes"] > 10**8
    assert AutoTokenizer.from_pretrained("zenflow-output").decode([70, 71])
    assert not list(Path("zenflow-output").glob(".unfinished*"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS.keys())
def test_each_form_of_data_trains(
    row: dict[str, object], suffix: str, small: list[object], cli: Cli, tmp_path: Path
) -> None:
    data = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        write_jsonl(data, [row] * 24)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 24), data)
    output = tmp_path / "out"
    result = cli(
        *(*small, "--data", data, "--max-length", 48, "--save-every", 0),
        *("--max-steps", 4, "--output", output),
    )
    assert result.code == 0, result.err
    assert summary_of(output)["heldout_loss"] == pytest.approx(loss_by_hand(output), rel=1e-5)
    if "completion" in row:
        labels = read_heldout(output / "heldout.jsonl")[0]["labels"]
        assert labels[0] == -100  # the prompt is not learned
        assert labels[-1] != -100


def test_evaluation_data_of_its_own(small: list[object], cli: Cli, tmp_path: Path) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "The value of item 500 is 3500."}])
    output = tmp_path / "out"
    result = cli(
        *(*small, "--eval-data", own, "--max-steps", 2, "--eval-every", 1, "--output", output)
    )
    assert result.code == 0, result.err
    tokenizer = AutoTokenizer.from_pretrained(output)
    (row,) = read_heldout(output / "heldout.jsonl")
    assert tokenizer.decode(row["input_ids"]).startswith("The value of item 500 is 3500.")


def test_bfloat16_weights_are_trained_and_saved(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    result = cli(*small, "--dtype", "bfloat16", "--max-steps", 12, "--output", output)
    assert result.code == 0, result.err
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    summary = summary_of(output)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["heldout_loss"] == pytest.approx(loss_by_hand(output), rel=2e-2)


def test_epochs_and_accumulation_set_the_number_of_steps(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a b", "completion": " c d"}] * 22)
    output = tmp_path / "out"
    result = cli(
        *(*small, "--data", data, "--epochs", 1.5, "--gradient-accumulation", 2),
        *("--output", output, "--save-every", 0),
    )
    assert result.code == 0, result.err
    # 21 rows are trained on (one is held out): 6 batches of 4, so 3 steps an epoch.
    assert summary_of(output)["steps"] == 5


def test_same_seed_same_model(small: list[object], cli: Cli, tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        arguments = ("--max-steps", 4, "--update-interval", 2, "--save-every", 0)
        assert cli(*small, *arguments, "--output", tmp_path / name).code == 0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_zenflow_keys_reach_the_optimizer(small: list[object], cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = cli(
        *(*small, "--max-steps", 3, "--update-interval", 3, "--topk-ratio", 0.5),
        *("--no-lookahead", "--update-rule", "accumulate", "--output", output),
    )
    assert result.code == 0, result.err
    summary = summary_of(output)
    assert summary["update_interval_last"] == 3
    assert summary["settings"]["zenflow"] == {
        "update_interval": 3,
        "topk_ratio": 0.5,
        "lookahead": False,
        "update_rule": "accumulate",
    }


def test_diverged_training_saves_no_model(small: list[object], cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = cli(
        *(*small, "--optimizer", "adamw", "--lr", 1e30, "--max-grad-norm", 0),
        *("--max-steps", 6, "--save-every", 0, "--output", output),
    )
    assert (result.code, len(result.messages)) == (1, 1)
    assert "the loss is not finite" in result.messages[0]
    assert not output.exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model", "cannot load the tokenizer of --model someone/thing: there is no such dir"),
        ("--data", "cannot load --data someone/thing: there is no such file here, and the"),
    ],
)
def test_hub_input_offline_says_what_was_tried(
    flag: str, message: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    result = cli("finetune", flag, "someone/thing")
    assert (result.code, len(result.messages)) == (2, 1)
    assert message in result.messages[0]
    assert list(tmp_path.iterdir()) == []


def test_broken_model_is_one_line(
    small: list[object], tiny_model: Path, cli: Cli, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(b"broken")
    result = cli(*small, "--model", model, "--output", tmp_path / "out")
    assert (result.code, len(result.messages)) == (2, 1)
    assert "cannot load the model" in result.messages[0]
    assert not (tmp_path / "out").exists()


def test_messages_need_a_chat_template(
    small: list[object], tiny_model: Path, cli: Cli, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).write_bytes(file.read_bytes())
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}] * 4)
    result = cli(*small, "--model", model, "--data", data, "--output", tmp_path / "out")
    assert (result.code, len(result.messages)) == (2, 1)
    assert "has no chat template" in result.messages[0]
