"""The output directory: never another's, never half-written as if it were whole."""

import json
from pathlib import Path

import pytest
from finetune_helpers import write_jsonl

from zenflow.cli.errors import RunError, UsageError
from zenflow.cli.finetune.checkpoints import discard_broken, newest_whole, seal
from zenflow.cli.finetune.outputs import OutputDir, RunRecord, choose_output, require_space

RECORD = RunRecord(settings={"seed": 0}, data_digest="d")


def published(path: Path) -> OutputDir:
    output = OutputDir(path)
    output.claim(RECORD)
    with output.staging() as staged:
        for name in ("config.json", "model.safetensors"):
            (staged / name).write_text("{}")
        output.publish(staged, {"loss_first": 1.0})
    return output


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_published_model_is_in_place_and_nothing_is_left_over(tmp_path: Path) -> None:
    output = published(tmp_path / "out")
    assert names(output.path) == {"run.json", "summary.json", "config.json", "model.safetensors"}
    assert output.read_record() == RECORD


def test_failure_before_publishing_leaves_nothing(tmp_path: Path) -> None:
    output = OutputDir(tmp_path / "out")
    output.claim(RECORD)

    def fail_half_way() -> None:
        with output.staging() as staged:
            (staged / "model.safetensors").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    output.abandon()
    assert not output.path.exists()


def test_crash_while_publishing_leaves_no_loadable_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = published(tmp_path / "out")
    with output.staging() as staged:
        for name in ("config.json", "model.safetensors"):
            (staged / name).write_text("new")
        monkeypatch.setattr("os.replace", _raise(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            output.publish(staged, {})
    assert not {"config.json", "summary.json"} & names(output.path)


def test_foreign_directory_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="not empty and holds no zenflow run"):
            OutputDir(tmp_path).check(resume=False, overwrite=overwrite)


def test_earlier_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    output = published(tmp_path / "out")
    (output.path / "notes.txt").write_text("the user's")
    with pytest.raises(UsageError, match="holds an earlier run"):
        output.check(resume=False, overwrite=False)
    output.check(resume=False, overwrite=True)
    output.claim(RECORD)
    assert names(output.path) == {"run.json", "notes.txt"}


def test_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        OutputDir(tmp_path / "file" / "out").check(resume=False, overwrite=False)


def test_output_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UsageError, match="no permission in"):
        OutputDir(tmp_path / "out").check(resume=False, overwrite=False)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing"),
        Exception("I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "torch", "safetensors"],
)
def test_full_disk_is_named_whoever_reports_it(error: Exception, tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    with pytest.raises(RunError, match="could not write to"), output.staging():
        raise error
    assert names(tmp_path) == set()


def test_space_is_checked_before_training(tmp_path: Path) -> None:
    require_space(tmp_path / "new" / "out", 1)
    with pytest.raises(UsageError, match="not enough disk space"):
        require_space(tmp_path / "new" / "out", 10**18)


def test_default_output_is_the_next_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_output(None, resume=False) == Path("zenflow-output")
    Path("zenflow-output").mkdir()
    assert choose_output(None, resume=False) == Path("zenflow-output-2")
    Path("zenflow-output-2").mkdir()
    assert choose_output(None, resume=True) == Path("zenflow-output-2")


def checkpoint(root: Path, step: int, *, sealed: bool = True) -> Path:
    path = root / f"checkpoint-{step}"
    path.mkdir()
    (path / "optimizer.pt").write_text("state")
    if sealed:
        seal(path, {"steps": step})
    return path


def test_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint(tmp_path, step, sealed=step != 100)
    found = newest_whole(tmp_path)
    assert found is not None
    assert (found.step, found.totals) == (10, {"steps": 10})
    assert discard_broken(tmp_path) == ["checkpoint-100"]


def test_sealed_checkpoint_with_a_short_or_lost_file_is_not_whole(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 1) / "optimizer.pt").write_text("st")
    (checkpoint(tmp_path, 2) / "optimizer.pt").unlink()
    assert newest_whole(tmp_path) is None


def test_no_checkpoint_directory(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none") is None
    assert discard_broken(tmp_path / "none") == []


def test_record_of_something_else_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "run.json", [{"other": 1}])
    with pytest.raises(UsageError, match="nothing to resume"):
        OutputDir(tmp_path).read_record()
    assert json.loads((tmp_path / "run.json").read_text()) == {"other": 1}


def _raise(error: Exception):
    def fail(*arguments: object) -> None:
        raise error

    return fail
