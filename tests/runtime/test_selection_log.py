"""The selection log says what happened, and changes nothing."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from zenflow.core.selection import channel_energy, num_selected, select_channels
from zenflow.core.selection_log import SelectionLog, parse, score_energy
from zenflow.runtime import selection_writer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((24, 40), (16, 30), (12, 20, 3))
RATIO = 0.2


def gradients(num_steps: int, seed: int = 0) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(shape, generator=random)
            * torch.rand(shape[1], generator=random).pow(3).view(1, -1, *[1] * (len(shape) - 2))
            for shape in SHAPES
        ]
        for _ in range(num_steps)
    ]


class Loop:
    """Some weights and their optimizer, fed with given gradients."""

    def __init__(self, log: Path | None, **config: Any) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        named = [(f"layers.{i}.q.weight", p) for i, p in enumerate(self.params)]
        self.optimizer = zenflow.ZenFlowAdamW(
            named,
            lr=1e-2,
            config={"topk_ratio": RATIO, "update_interval": 2, "selection_log": log, **config},
        )

    def run(self, steps: list[list[Tensor]]) -> "Loop":
        for grads in steps:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad.clone()
            self.optimizer.step()
        return self

    def end(self) -> list[Tensor]:
        self.optimizer.close()
        return [param.detach().clone() for param in self.params]


def read(path: Path) -> SelectionLog:
    return parse(path.read_text(encoding="utf-8").splitlines())


def channels_of(bits: int) -> list[int]:
    return [c for c in range(bits.bit_length()) if bits >> c & 1]


@pytest.mark.parametrize("select_interval", [1, 3])
def test_every_scoring_is_logged_with_its_own_gradients_energy(
    select_interval: int, tmp_path: Path
) -> None:
    steps = gradients(14)
    Loop(tmp_path / "log", select_interval=select_interval).run(steps).end()
    log = read(tmp_path / "log")
    assert log.topk_ratio == RATIO
    assert log.update_intervals == [(1, 2)]
    seen: dict[str, list[int]] = {}
    before: dict[str, tuple[int, list[int]]] = {}
    for scoring in log.scorings:
        number = int(scoring.weight.split(".")[1])
        energy = channel_energy(steps[scoring.step - 1][number]).double()
        chosen = select_channels(energy, num_selected(len(energy), RATIO)).tolist()
        assert channels_of(scoring.chosen) == chosen
        assert scoring.channels == SHAPES[number][1]
        share = energy / energy.sum()
        assert scoring.captured == pytest.approx(share[chosen].sum().item(), abs=1e-4)
        ordered = share.sort(descending=True).values
        tops = [ordered[: max(1, round(r * len(share)))].sum().item() for r in (0.01, 0.05, 0.1)]
        assert scoring.shares == pytest.approx(tops, abs=1e-4)
        if scoring.weight in before:
            step, last = before[scoring.weight]
            assert scoring.before == step
            assert scoring.captured_before == pytest.approx(share[last].sum().item(), abs=1e-4)
        else:
            assert scoring.before is None and scoring.step == 1
        before[scoring.weight] = scoring.step, chosen
        seen.setdefault(scoring.weight, []).append(scoring.step)
    assert len(seen) == len(SHAPES)
    for scored in seen.values():  # the last step's choice is still on its way
        assert len(scored) >= 13 // select_interval


@pytest.mark.parametrize("streams", [False, True])
def test_a_log_changes_no_bit(streams: bool, tmp_path: Path) -> None:
    def weights(log: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))
        config = {"update_interval": 3, "stream_gradients": streams, "selection_log": log}
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
        for _ in range(20):
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [p.detach().clone() for p in model.parameters()]

    with_log, without = weights(tmp_path / "log"), weights(None)
    assert all(torch.equal(a, b) for a, b in zip(with_log, without, strict=True))
    scorings = read(tmp_path / "log").scorings
    assert {s.weight for s in scorings} == {"0.weight", "2.weight"}
    assert len(scorings) > 4


def test_what_a_resumed_run_does_anew_counts(tmp_path: Path) -> None:
    path, steps, others = tmp_path / "log", gradients(20), gradients(20, seed=1)
    first = Loop(path, select_interval=1).run(steps[:6])
    saved = first.optimizer.state_dict()
    first.run(steps[6:12]).end()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 12, "weight": "layers.0.q.wei')  # as a killed process leaves it
    second = Loop(path, select_interval=1)
    second.optimizer.load_state_dict(saved)
    second.run(others[6:20]).end()
    log = read(path)
    assert log.num_unreadable == 1
    for scoring in log.scorings:
        source = steps if scoring.step <= 6 else others
        number = int(scoring.weight.split(".")[1])
        chosen = select_channels(
            channel_energy(source[scoring.step - 1][number]), num_selected(SHAPES[number][1], RATIO)
        )
        assert channels_of(scoring.chosen) == chosen.tolist()
    assert {s.step for s in log.scorings} >= {1, 5, 8, 19}


def test_a_new_run_with_the_same_file_begins_anew(tmp_path: Path) -> None:
    for num_steps in (12, 4):
        Loop(tmp_path / "log", select_interval=1).run(gradients(num_steps)).end()
    assert max(s.step for s in read(tmp_path / "log").scorings) < 4


def test_a_skipped_step_leaves_no_scoring_of_its_own(tmp_path: Path) -> None:
    steps = gradients(8)
    bad = [grad.clone() for grad in steps[3]]
    bad[0][0, 0] = float("nan")
    Loop(tmp_path / "log", select_interval=1).run([*steps[:3], bad, *steps[3:]]).end()
    for scoring in read(tmp_path / "log").scorings:
        number = int(scoring.weight.split(".")[1])
        energy = channel_energy(steps[scoring.step - 1][number])
        chosen = select_channels(energy, num_selected(len(energy), RATIO))
        assert channels_of(scoring.chosen) == chosen.tolist()


@pytest.mark.parametrize("drop", ["nan", "zeroed"])
def test_a_first_gradient_that_was_streamed_and_dropped_leaves_none(
    drop: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    used, unused = nn.Linear(40, 24), nn.Linear(40, 24)
    config = {"stream_gradients": True, "selection_log": tmp_path / "log", "select_interval": 1}
    named = [*used.named_parameters("used"), *unused.named_parameters("unused")]
    optimizer = zenflow.ZenFlowAdamW(named, config=config)
    for step in range(4):
        loss = used(torch.randn(8, 40)).square().mean()
        if step == 0:
            loss = loss + unused(torch.randn(8, 40)).square().mean()
            (loss * float("nan") if drop == "nan" else loss).backward()
            if drop == "zeroed":
                optimizer.zero_grad()
                continue
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    scorings = read(tmp_path / "log").scorings
    assert {(s.step, s.weight, s.before) for s in scorings} == {
        (1, "used.weight", None),
        (2, "used.weight", 1),
    }


@pytest.mark.parametrize(
    ("place", "reason"),
    [("missing/log", "does not exist"), (".", "not a file"), ("file/log", "does not exist")],
)
def test_a_place_that_cannot_be_written_is_refused_at_construction(
    place: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"selection_log=.*{reason}"):
        Loop(tmp_path / place)


@pytest.mark.parametrize(("name", "reason"), [("a" * 300, "too long"), ("a\0b", "null")])
def test_a_name_that_no_file_can_have_is_refused_at_construction(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)selection_log=.*cannot be written: .*{reason}"):
        Loop(tmp_path / name)


def test_the_place_is_the_one_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts change the working directory between building an optimizer and its first step."""
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loops = [Loop(Path("log")), Loop(Path("~/home-log"))]
    monkeypatch.chdir("other")
    for loop in loops:
        loop.run(gradients(2)).end()
    assert read(tmp_path / "log").scorings
    assert read(tmp_path / "home-log").scorings
    assert not list((tmp_path / "other").iterdir())


def test_a_process_that_does_not_write_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process's folder may not exist on another machine."""
    monkeypatch.setattr(selection_writer, "is_first_process", lambda: False)
    Loop(tmp_path / "missing" / "log").run(gradients(2)).end()


def test_training_goes_on_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    loop = Loop(tmp_path / "log", select_interval=1)
    (tmp_path / "log").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "zenflow"):
        loop.run(gradients(6)).end()
    assert [r.getMessage() for r in caplog.records if "selection log" in r.getMessage()] == [
        "the selection log ends here: [Errno 28] No space left on device"
    ]
    assert loop.optimizer.stats.step == 6


def test_one_process_of_a_group_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_writer, "is_first_process", lambda: False)
    Loop(tmp_path / "log", select_interval=1).run(gradients(4)).end()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_energies_without_a_sum_are_left_out(value: float) -> None:
    assert score_energy(torch.full((8,), value), torch.tensor([1]), None) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no selection log"),
        (['{"text": "a data file"}', "plain text", "[1]", "3", "null"], "no selection log"),
        (['{"zenflow": 2, "step": 0, "topk_ratio": 0.1}'], "layout is 2"),
    ],
)
def test_other_files_are_refused(lines: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(lines)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": ["w"]},
        {"step": "1"},
        {"step": None},
        {"channels": 0},
        {"chosen": "0"},
        {"chosen": "-3"},
        {"chosen": "fff"},
        {"shares": [0.1]},
        {"shares": [0.1, float("nan"), 0.3]},
        {"captured": float("inf")},
        {"captured_before": "0.1"},
    ],
)
def test_a_line_that_no_optimizer_writes_is_counted_and_left_out(change: dict[str, Any]) -> None:
    row = {"step": 1, "weight": "w", "channels": 8, "shares": [0.1, 0.2, 0.3]}
    row |= {"captured": 0.3, "chosen": "3"}
    head = '{"zenflow": 1, "step": 0, "topk_ratio": 0.1}'
    log = parse([head, json.dumps(row), json.dumps({**row, **change}), "[" * 100_000])
    assert log.num_unreadable == 2
    assert len(log.scorings) == 1


def test_lines_are_whole_json_objects(tmp_path: Path) -> None:
    Loop(tmp_path / "log").run(gradients(5)).end()
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert rows[0] == {"zenflow": 1, "step": 0, "topk_ratio": RATIO}
