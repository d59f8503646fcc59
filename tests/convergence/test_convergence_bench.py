"""The bench's own parts: what a run is called, in which order runs come, what is counted how."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.plan import Run, all_runs, chosen
from benchmarks.convergence.report import svg
from benchmarks.convergence.report.observations import Observations
from benchmarks.convergence.report.page import files_of
from benchmarks.convergence.report.results import Results, difference
from benchmarks.convergence.runner import Estimates, _affordable
from benchmarks.convergence.settings import TASKS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/convergence"


def result(method: str, seed: int, loss: float, lr: float = 1e-3, **more: object) -> dict:
    run = Run("A", method, lr, seed)
    fields = {"task": "A", "method": method, "lr": lr, "seed": seed, "settings": run.settings}
    return {**fields, "heldout": {"loss": loss}, "environment": {}, **more}


def write(folder: Path, *results: dict) -> Results:
    for number, row in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(row))
    return Results(folder)


def test_each_run_has_a_file_of_its_own():
    names = [run.file_name for run in all_runs()]
    assert len(set(names)) == len(names)


def test_the_main_table_comes_first_and_seed_by_seed():
    runs = all_runs()
    main = [run.how.group == "main" for run in runs]
    assert main == sorted(main, reverse=True)
    seeds = [run.seed for run in runs if run.how.group == "main"]
    assert seeds == sorted(seeds)
    assert {run.task for run in runs if run.seed == 0 and run.how.group == "main"} == set("ABC")


def test_every_learning_rate_and_seed_is_planned_for_the_main_methods():
    for task in TASKS.values():
        of_adamw = {
            (r.lr, r.seed) for r in all_runs() if (r.task, r.method) == (task.name, "adamw")
        }
        assert of_adamw == {(lr, seed) for lr in task.lrs for seed in range(task.seeds)}
        assert task.middle in task.lrs


def test_a_baseline_is_a_method():
    assert all(method.baseline in METHODS for method in METHODS.values())


def test_only():
    assert {r.task for r in chosen(all_runs(), ["A"])} == {"A"}
    assert {(r.task, r.method) for r in chosen(all_runs(), ["B:s4"])} == {("B", "s4")}
    with pytest.raises(ValueError, match="'D' is not TASK"):
        chosen(all_runs(), ["D"])


def test_no_run_is_started_that_would_not_end_in_time():
    import time

    now_s = time.monotonic()
    estimates = Estimates()
    estimates.add("A", 100.0)
    runs = [Run("A", "adamw", 1e-3, 0)]
    assert list(_affordable(runs, estimates, now_s + 1000)) == runs
    assert list(_affordable(runs, estimates, now_s + 100)) == []


def test_gaps_are_taken_seed_by_seed():
    gap = difference({0: 2.0, 1: 5.0, 2: 9.0}, {0: 1.0, 1: 3.0})
    assert (gap.mean, gap.count) == (1.5, 2)


def test_results_of_other_settings_are_left_out(tmp_path):
    results = write(tmp_path, result("adamw", 0, 2.0), result("adamw", 1, 2.0, settings="0"))
    assert (len(results.all), results.num_outdated) == (1, 1)


def test_the_best_learning_rate_is_over_common_seeds(tmp_path):
    results = write(
        tmp_path,
        result("s4", 0, 2.0, lr=1e-3),
        result("s4", 0, 3.0, lr=2e-3),
        result("s4", 1, 1.0, lr=2e-3),
    )
    assert results.best_lr("A", "s4") == 1e-3


def test_a_diverged_run_is_the_worst(tmp_path):
    diverged = result("s4", 0, 0.0, diverged_at=3)
    del diverged["heldout"]
    results = write(tmp_path, diverged, result("s4", 0, 3.0, lr=5e-4))
    assert results.values("A", "s4", 1e-3) == {0: math.inf}
    assert results.best_lr("A", "s4") == 5e-4


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_is_well_formed(log):
    series = [svg.Series("a & b", [(1, 0.1), (10, 0.2)]), svg.Series("c", [(1, 0.1), (10, 0.19)])]
    text = svg.lines("T", series, x_label="x", y_label="y", log_x=log, log_y=log)
    assert "a & b" in "".join(ET.fromstring(text).itertext())


def test_the_committed_page_is_what_the_results_give():
    observations = Observations(RESULTS / "observations")
    for name, content in files_of(Results(RESULTS), observations).items():
        committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert committed == content, "run: make convergence-report"
