"""Ctrl-C, full disks, and going on from what is whole."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from finetune_helpers import Cli, start_process, summary_of
from transformers import AutoModelForCausalLM

from zenflow.cli.finetune.stopping import StopRequest

INTERVAL = ("--update-interval", 3)


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").glob("checkpoint-*"))


def test_ctrl_c_saves_a_checkpoint_and_resume_goes_on(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    process = start_process(
        *(*small, "--max-steps", 100_000, "--save-every", 0, "--output", output), cwd=tmp_path
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "/100000 loss" in line:
            break
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    messages = [line for line in err.splitlines() if line.startswith("zenflow: interrupted")]
    assert len(messages) == 1
    assert "Traceback" not in err
    assert "continue with: zenflow finetune --output" in messages[0]
    (name,) = checkpoints(output)
    step = int(name.split("-")[1])
    assert not (output / "config.json").exists()
    assert not (output / "summary.json").exists()

    result = cli("finetune", "--output", output, "--resume", "--max-steps", step + 3)
    assert result.code == 0, result.err
    summary = summary_of(output)
    assert (summary["resumed_from_step"], summary["steps"]) == (step, step + 3)
    assert summary["tokens"] > step * 4 * 16  # those of both sessions
    assert summary["heldout_loss_before"] is not None


def test_signals_are_noted_and_a_second_ctrl_c_interrupts() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        stop = StopRequest()
        with stop:
            os.kill(os.getpid(), number)
            assert stop.signal_number == number
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.covers("resume", "zenflow finetune")
def test_resumed_run_ends_like_one_that_never_stopped(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    steps = (*INTERVAL, "--lr-schedule", "constant", "--save-every", 4)
    assert cli(*small, *steps, "--max-steps", 8, "--output", tmp_path / "whole").code == 0
    assert cli(*small, *steps, "--max-steps", 4, "--output", tmp_path / "parts").code == 0
    result = cli("finetune", "--output", tmp_path / "parts", "--resume", "--max-steps", 8)
    assert result.code == 0, result.err
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("whole", "parts")]
    for whole, parts in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole, parts)
    assert summary_of(tmp_path / "parts")["loss_first"] == pytest.approx(
        summary_of(tmp_path / "whole")["loss_first"]
    )


def test_finished_run_is_not_resumed_or_replaced_unasked(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert cli(*small, "--max-steps", 2, "--output", output).code == 0
    before = (output / "summary.json").read_text()
    for arguments, message in (
        (("finetune", "--output", output, "--resume"), "is finished"),
        ((*small, "--output", output), "holds an earlier run"),
        (
            ("finetune", "--output", output, "--resume", "--lr", 1),
            "--lr 1.0 differs from the run to resume",
        ),
        (("finetune", "--output", output, "--resume", "--topk-ratio", 0.5), "--topk-ratio 0.5"),
    ):
        result = cli(*arguments)
        assert (result.code, len(result.messages)) == (2, 1)
        assert message in result.messages[0]
    assert (output / "summary.json").read_text() == before
    result = cli(*small, "--max-steps", 1, "--overwrite", "--output", output)
    assert (result.code, summary_of(output)["steps"]) == (0, 1)


def test_changed_data_is_noticed(
    small: list[object], text_file: Path, cli: Cli, tmp_path: Path
) -> None:
    data = tmp_path / "data.txt"
    data.write_text(text_file.read_text())
    output = tmp_path / "out"
    assert cli(*small, "--data", data, "--max-steps", 2, "--output", output).code == 0
    data.write_text("Another text.\n\n" * 99)
    result = cli("finetune", "--output", output, "--resume", "--max-steps", 4)
    assert (result.code, "the data has changed" in result.err) == (2, True)


def test_full_disk_while_saving_keeps_the_last_whole_checkpoint(
    small: list[object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    save = torch.save

    def fill_up(value: object, path: object, *rest: object, **more: object) -> None:
        if "checkpoint-4" in str(path) and str(path).endswith("scheduler.pt"):
            raise OSError(28, "No space left on device")
        save(value, path, *rest, **more)

    monkeypatch.setattr(torch, "save", fill_up)
    result = cli(*small, *INTERVAL, "--max-steps", 6, "--save-every", 2, "--output", output)
    assert (result.code, len(result.messages)) == (1, 1)
    assert "no space left on the device; checkpoint-2 is saved, continue with" in result.err
    assert checkpoints(output) == ["checkpoint-2"]
    assert not (output / "config.json").exists()

    monkeypatch.undo()
    result = cli("finetune", "--output", output, "--resume")
    assert (result.code, summary_of(output)["steps"]) == (0, 6)


def test_full_disk_for_the_model_leaves_none(
    small: list[object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zenflow.cli.finetune.session.write_heldout", full)
    output = tmp_path / "out"
    result = cli(*small, "--max-steps", 2, "--save-every", 0, "--output", output)
    assert (result.code, "no space left on the device" in result.err) == (1, True)
    assert not output.exists()


def test_interrupted_after_training_is_published_without_training_again(
    small: list[object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "out"
    monkeypatch.setattr("zenflow.cli.finetune.run._verify", interrupt)
    result = cli(*small, "--max-steps", 3, "--output", output)
    assert (result.code, len(result.messages)) == (130, 1)
    assert "checkpoint-3 is saved" in result.err
    assert not (output / "config.json").exists()

    monkeypatch.undo()
    result = cli("finetune", "--output", output, "--resume")
    assert result.code == 0, result.err
    assert summary_of(output)["steps"] == 3
    assert summary_of(output)["tokens"] == 3 * 4 * 32


def test_no_space_is_said_before_training(
    small: list[object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    result = cli(*small, "--output", tmp_path / "out")
    assert (result.code, "not enough disk space" in result.err) == (2, True)
    assert not (tmp_path / "out").exists()
