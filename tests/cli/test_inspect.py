"""``zenflow inspect``: tables and plots of a selection log."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from finetune_helpers import Cli, write_jsonl

from zenflow.cli.inspect.findings import ALL, findings, kinds_of
from zenflow.core.selection_log import Scoring, SelectionLog

HEAD = {"zenflow": 1, "step": 0, "topk_ratio": 0.25}


def scoring(step: int, weight: str, chosen: int, **others: Any) -> dict[str, Any]:
    return {
        "step": step,
        "weight": weight,
        "channels": 8,
        "shares": [0.2, 0.3, 0.4],
        "captured": 0.6,
        "chosen": f"{chosen:x}",
        **others,
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [HEAD, {"step": 1, "update_interval": 1}]
    for step in range(1, 41):
        for layer in range(2):
            before = {"before": step - 1, "captured_before": 0.5} if step > 1 else {}
            # q keeps its choice; k alternates between two that share one channel of two
            rows.append(scoring(step, f"model.layers.{layer}.q.weight", 0b11, **before))
            k = 0b110 if step % 2 else 0b011
            rows.append(scoring(step, f"model.layers.{layer}.k.weight", k, **before))
    rows.append({"step": 20, "update_interval": 4})
    return write_jsonl(tmp_path / "run.jsonl", rows)


def test_figures_of_a_log_that_was_made_up(log: Path, cli: Cli) -> None:
    result = cli("inspect", log, "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    assert content["topk_ratio"] == 0.25
    assert content["update_intervals"] == [[1, 1], [20, 4]]
    whole, k, q = content["findings"]
    assert [f["kind"] for f in (whole, k, q)] == ["all", "layers.*.k", "layers.*.q"]
    assert [f["weights"] for f in (whole, k, q)] == [4, 2, 2]
    assert q["kept"] == {"1": 1, "2": 1, "4": 1, "8": 1, "16": 1, "32": 1}
    assert k["kept"]["1"] == 0.5 and k["kept"]["2"] == 1
    for finding in (whole, k, q):
        assert finding["shares"] == pytest.approx([0.2, 0.3, 0.4])
        assert finding["selected"] == 0.25
        assert finding["captured"] == pytest.approx(0.6)
        assert finding["captured_before"] == pytest.approx(0.5)
        assert finding["lag"] == 1


def test_tables_and_plots(log: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli("inspect", log, "--output", tmp_path / "new" / "plots")
    assert result.code == 0, result.err
    assert "4 weights, 160 scorings, steps 1 to 40" in result.out
    assert "25% of the channels hold 60%" in result.out
    assert "2.4 times an even share" in result.out
    assert "1.0 steps old on average, still holds 50%: it lasts." in result.out
    for name in ("skew", "stability", "interval"):
        path = tmp_path / "new" / "plots" / f"run-{name}.svg"
        assert str(path) in result.out
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_run_that_was_just_begun(tmp_path: Path, cli: Cli) -> None:
    """One scoring, no later one, nothing said of S yet."""
    path = write_jsonl(tmp_path / "log.jsonl", [HEAD, scoring(1, "w", 0b11)])
    result = cli("inspect", path)
    assert result.code == 0, result.err
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == ["log-skew.svg"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"text": "data"}], "it is no selection log"),
        ([HEAD, {"step": 1, "update_interval": 2}], "topk_ratio selects none or all"),
        ([{**HEAD, "zenflow": 3}], "layout is 3"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(
    rows: list[Any], reason: str, tmp_path: Path, cli: Cli
) -> None:
    result = cli("inspect", write_jsonl(tmp_path / "log", rows))
    assert result.code == 2
    assert len(result.messages) == 1 and reason in result.messages[0]


def test_a_missing_log_says_how_to_record_one(tmp_path: Path, cli: Cli) -> None:
    for place in (tmp_path, tmp_path / "no"):
        result = cli("inspect", place)
        assert result.code == 2
        assert "--selection-log" in result.messages[0]


def test_plots_that_cannot_be_written_are_a_line(log: Path, cli: Cli) -> None:
    result = cli("inspect", log, "--output", log)
    assert result.code == 2
    assert "cannot write plots" in result.messages[0]


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["h.0.attn.q.weight", "h.11.attn.q.weight", "wte.weight"], ["h.*.attn.q", "wte"]),
        (["0.weight", "2.weight"], ["0", "2"]),
        (["0.q.weight", "0.k.weight", "11.q.weight"], ["*.k", "*.q"]),
        (["0.q.0.weight", "1.q.0.weight", "2.weight"], ["*.q.*", "2"]),
        (["weight"], ["weight"]),
        (["model.a.0.b.weight", "model.a.1.b.weight"], ["model.a.*.b"]),
        (["model.a.b.weight", "model.a.weight", "model.c"], ["a", "a.b", "c"]),
        (["parameter 3 of group 0", "parameter 4 of group 0"], None),
    ],
)
def test_layer_types(names: list[str], kinds: list[str] | None) -> None:
    found = kinds_of(names)
    assert list(found) == names
    assert sorted(set(found.values())) == (kinds or sorted(names))


@pytest.mark.parametrize(("lag", "advice"), [(1, "no select_interval"), (4, "a smaller select_")])
def test_no_smaller_interval_than_one_is_advised(
    lag: int, advice: str, tmp_path: Path, cli: Cli
) -> None:
    later = scoring(1 + lag, "w", 0b11, before=1, captured_before=0.1)
    result = cli("inspect", write_jsonl(tmp_path / "log", [HEAD, scoring(1, "w", 0b11), later]))
    assert (
        f"still holds 10%: it ages{' within a step, and' if lag == 1 else ';'} {advice}"
        in result.out
    )


def test_a_name_that_cannot_be_shown_spoils_no_plot(tmp_path: Path, cli: Cli) -> None:
    rows = [HEAD, *(scoring(1, name, 0b11) for name in ("a\0<&\x1b[2J", "\ud800", "b\nc"))]
    result = cli("inspect", write_jsonl(tmp_path / "log.jsonl", rows))
    assert result.code == 0, result.err
    assert "a?<&?[2J" in result.out and "b?c" in result.out
    ElementTree.parse(tmp_path / "log-skew.svg")


def test_a_path_that_no_file_can_have_is_a_line(cli: Cli) -> None:
    result = cli("inspect", "a" * 300)
    assert result.code == 2
    assert len(result.messages) == 1 and "cannot read" in result.messages[0]


def test_irregular_steps_are_compared_with_the_nearest() -> None:
    scorings = [
        Scoring(step=step, weight="w", channels=8, shares=(0.1, 0.2, 0.3), chosen=3, captured=0.5)
        for step in (1, 5, 12, 40, 41, 104)
    ]
    kept = findings(SelectionLog(topk_ratio=0.25, scorings=scorings))[0].kept
    assert set(kept) == {1, 4, 8, 16, 32, 64}
    assert set(kept.values()) == {1.0}


def test_a_run_of_finetune_is_inspected(small: list[object], cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "out"
    half = [*small, "--selection-log", "--save-every", 6, "--output", output]
    assert cli(*half, "--max-steps", 6).code == 0
    assert cli("finetune", "--resume", "--output", output, "--max-steps", 12).code == 0
    result = cli("inspect", output, "--json")
    assert result.code == 0, result.err
    kinds = [f["kind"] for f in json.loads(result.out)["findings"]]
    assert "layers.*.self_attn.q_proj" in kinds
    steps = [
        json.loads(line)["step"] for line in (output / "selection.jsonl").read_text().splitlines()
    ]
    assert steps.count(6) and max(steps) > 6  # the resumed part is in the same file
    assert cli(*small, "--max-steps", 2, "--overwrite", "--output", output).code == 0
    assert not (output / "selection.jsonl").exists()


def test_finetune_refuses_a_log_of_another_optimizer(
    small: list[object], cli: Cli, tmp_path: Path
) -> None:
    result = cli(*small, "--optimizer", "adamw", "--selection-log", "--output", tmp_path / "out")
    assert result.code == 2
    assert "--selection-log has no effect" in result.messages[0]


@pytest.mark.parametrize("seed", range(5))
def test_kept_shares_are_those_of_all_pairs(seed: int) -> None:
    random = Random(seed)
    scorings = []
    for weight in ("a.0.q.weight", "a.1.q.weight", "a.0.k.weight"):
        step = random.randint(1, 4)
        for _ in range(30):
            values = {"shares": (0.1, 0.2, 0.3), "captured": 0.5}
            chosen = random.getrandbits(16) | 1
            scorings.append(Scoring(step=step, weight=weight, channels=16, chosen=chosen, **values))
            step += random.randint(1, 6)
    kinds = {ALL: "", "a.*.q": "q", "a.*.k": "k"}
    for finding in findings(SelectionLog(topk_ratio=0.25, scorings=scorings)):
        ours = [s for s in scorings if kinds[finding.kind] in s.weight]
        expected: dict[int, list[float]] = {}
        for early, lag in itertools.product(ours, (2**i for i in range(9))):
            run = [s for s in ours if s.weight == early.weight]
            later = min(run, key=lambda s, to=early.step + lag: (abs(s.step - to), s.step))
            apart = later.step - early.step
            if lag <= run[-1].step - run[0].step and lag / 1.5 < apart < lag * 1.5:
                both = bin(early.chosen & later.chosen).count("1")
                expected.setdefault(lag, []).append(both / bin(early.chosen).count("1"))
        assert finding.kept == pytest.approx({lag: fmean(s) for lag, s in expected.items()})
