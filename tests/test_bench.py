"""``zenflow bench``: its parts, and each benchmark once with tiny sizes."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from zenflow.backends.ticket import FINISHED
from zenflow.cli.bench import processes
from zenflow.cli.bench.contenders import chosen, no_offload, ours, ours_synchronous
from zenflow.cli.bench.engines import OurEngine
from zenflow.cli.bench.interpreters import command_in, read_answer
from zenflow.cli.bench.link import RatedLink
from zenflow.cli.bench.overlap_report import Cell, add_model
from zenflow.cli.bench.processes import Child, Turns
from zenflow.cli.bench.report import Report, Target, shown_command, thread_counts
from zenflow.cli.bench.stub import StubModel
from zenflow.cli.bench.summary import Spread, percentile
from zenflow.cli.errors import RunError, UsageError
from zenflow.cli.main import main
from zenflow.cli.plot import Line, plot, ticks

TINY = {"kind": "stub", "numel": 4 * 64 * 64, "side": 64}


def loss() -> list[torch.Tensor]:
    return [torch.zeros((), requires_grad=True)]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 25, 2.0),
        (list(range(101)), 95, 95.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
    ],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_thread_counts(cores, counts):
    assert thread_counts(cores) == counts


@pytest.mark.parametrize(
    ("high", "step", "last"), [(1.0, 0.2, 1.0), (93, 20, 100), (7, 2, 8), (0, 1, 1)]
)
def test_ticks_are_round_and_reach_the_highest_value(high, step, last):
    found = ticks(high)
    assert found[1] - found[0] == pytest.approx(step)
    assert found[-1] == pytest.approx(last)


def test_a_plot_is_a_picture_with_every_line():
    lines = [Line("a < b", [(1, 2), (3, 4)]), Line("c", [(2, 2)])]
    svg = ElementTree.fromstring(
        plot(lines, title="t", x_label="x", y_label="y", diagonal="compute")
    )
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"a < b", "c", "compute", "t", "x", "y"} <= set(texts)


def test_the_command_in_a_report_shows_no_path_of_this_machine():
    words = ["bench", "kernel", "--deepspeed-python", "/home/me/python", "--output=/tmp/x.md"]
    shown = "zenflow bench kernel --deepspeed-python PATH --output=PATH"
    assert shown_command(words) == shown
    assert (
        shown_command(["--output", "benchmarks/results"]) == "zenflow --output benchmarks/results"
    )


def test_a_report_goes_into_files_beside_each_other(tmp_path):
    report = Report("theme", "Title", body=["text"], pictures={"50m": "<svg/>"})
    report.figures = {"a": 1}
    target = Target(tmp_path / "new")
    target.check()
    markdown, data, picture = target.write(report, ["bench", "theme"])
    assert markdown.name.startswith("theme_") and markdown.suffix == ".md"
    assert f"({picture.name})" in markdown.read_text()
    assert json.loads(data.read_text())["figures"] == {"a": 1}
    assert os.uname().nodename not in markdown.read_text()


def test_a_stub_backward_pass_takes_its_time_and_no_cpu():
    model = StubModel(4 * 64 * 64, side=64)
    model.compute_s = 0.2
    model(*loss()).backward()  # first calls are slow
    begin_s, cpu_s = time.perf_counter(), time.thread_time()
    model(*loss()).backward()
    assert time.perf_counter() - begin_s >= 0.2
    assert time.thread_time() - cpu_s < 0.05


def test_gradients_are_handed_over_without_a_copy_and_come_back():
    model = StubModel(4 * 64 * 64, side=64)
    blocks = {block: memory.clone() for block, memory in model.pool._memory.items()}
    model(*loss()).backward()
    assert {weight.grad.data_ptr() for weight in model.weights} == set(blocks)
    held = model.weights[0].grad
    for weight in model.weights:
        weight.grad = None
    model(*loss()).backward()
    assert len(model.pool) == 5, "a gradient that is still held must not be handed out again"
    assert torch.equal(held, blocks[held.data_ptr()])


@pytest.mark.parametrize(("interval", "most"), [(1, 2), (2, 3), (4, 5)])
def test_this_library_takes_ready_gradients_as_slots(interval, most):
    model = StubModel(4 * 64 * 64, side=64)
    engine = OurEngine(model, {"update_interval": interval, "host_threads": 1}, None)
    for _ in range(12):
        engine.step(loss())
    assert 4 < len(model.pool) <= 4 * most
    engine.close()
    assert len(model.pool._free) == len(model.pool)


class Square(torch.nn.Linear):
    """Its forward is a loss."""

    def forward(self, inputs):
        return super().forward(inputs).square().mean()


def test_a_rated_link_changes_no_bit():
    weights = []
    for rate in (None, 1e8):
        torch.manual_seed(0)
        model = Square(64, 64)
        engine = OurEngine(model, {"update_interval": 2, "host_threads": 2}, rate)
        for _ in range(6):
            engine.step([torch.randn(8, 64)])
        engine.close()
        weights.append(model.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_rated_links_copies(contiguous):
    link = RatedLink(1e7)
    source = torch.arange(2**19, dtype=torch.int32).view(512, 1024)
    source = source if contiguous else source.t()
    target = torch.zeros_like(source)
    begin_s = time.perf_counter()
    transfer = link.to_host(source, target, FINISHED)
    assert not transfer.done()
    assert torch.equal(transfer.wait(), source)
    assert time.perf_counter() - begin_s >= source.nbytes / 1e7
    link.close()


def test_a_module_runs_in_a_process_of_its_own(tmp_path):
    command = command_in(sys.executable, "zenflow.cli.bench.interpreters", "a", "b c")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert read_answer(done.stdout.splitlines()) == [sys.executable, "a", "b c"]


def test_a_contender_that_fails_says_why():
    with pytest.raises(RunError, match=r"zenflow S=1 failed: ValueError: topk_ratio=5"):
        Child(ours(1, topk_ratio=5), TINY)


def test_contenders_take_turns_alone_where_memory_does_not_hold_all(monkeypatch):
    contender = no_offload()
    assert Turns([contender], TINY["numel"], TINY).all_alive
    available = processes.available_memory()._replace(num_bytes=1)
    monkeypatch.setattr(processes, "available_memory", lambda: available)
    turns = Turns([contender], TINY["numel"], TINY)
    with turns.turn(contender) as child:
        answer = child.ask("block", steps=3, warm_up=1, compute_s=0.01)
    assert len(answer["seconds"]) == 3 and min(answer["seconds"]) >= 0.01
    assert not turns.all_alive and not turns._children


def test_only_some_contenders():
    found = [no_offload(), ours_synchronous(0.1), ours(4, 0.1)]
    assert chosen(found, ["S=4", "torch"]) == [found[0], found[2]]
    with pytest.raises(UsageError, match="'S=5' fits no contender; they are: torch AdamW"):
        chosen(found, ["S=5"])


def test_stalls_and_targets_are_counted_as_they_are_defined():
    contender = ours(4, 0.1)
    cell = Cell(contender, compute_s=0.1)
    figures = {"wait_s": 0.001, "training_thread_s": 0.002, "host_busy_s": 1e-3}
    figures |= {"update_interval": 4, "traffic_model_sizes": 1.1}
    cell.add({"seconds": [0.1, 0.1, 0.1, 0.2], "figures": [figures] * 4})
    assert cell.beyond_s == pytest.approx(0.025)
    assert cell.stall_share == pytest.approx(0.2)
    report = Report("overlap", "t")
    report.figures = {"models": []}
    add_model(report, 50_000_000, 0.2, [cell])
    text = "\n".join(report.body)
    assert "### Compute 100.0 ms (0.50 of the synchronous time)" in text
    assert "| zenflow S=4 | 100.0 | 20.0% missed | 1.97 missed |" in text
    assert list(report.pictures) == ["50m"]


def test_a_spread_is_ready_for_json():
    assert Spread.of([1.0, 3.0]).to_dict()["mean"] == 2.0


REFUSED = {
    "no benchmark": ([], "BENCHMARK"),
    "no parameters": (["kernel", "--numel", "0"], "--numel: '0' is not an integer >= 1"),
    "too many threads": (["kernel", "--threads", "4096"], "--threads 4096: "),
    "an empty list": (["kernel", "--threads", "1,"], "'1,' is not a list"),
    "an output of another kind": (
        ["kernel", "--output", "x.txt"],
        "neither a .md file nor a folder",
    ),
    "less than a matrix": (["overlap", "--numel", "100"], "--numel 100 is less than one matrix"),
    "two kinds of times": (
        ["overlap", "--fractions", "1", "--compute-ms", "1"],
        "not allowed with",
    ),
    "no such contender": (["overlap", "--only", "adagrad"], "'adagrad' fits no contender"),
    "a link of no rate": (["overlap", "--link-gbs", "0"], "'0' is not a number > 0"),
    "no such interpreter": (
        ["overlap", "--deepspeed-python", "/no/python"],
        "/no/python: FileNotFound",
    ),
    "an interpreter without DeepSpeed": (
        ["train", "--deepspeed-python", sys.executable],
        "has no deepspeed; `make deepspeed`",
    ),
    "a small model of nothing": (["memory", "--numel", "1000"], "--numel 1000: an eighth"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_in_one_line(name, capsys):
    arguments, message = REFUSED[name]
    try:
        code = main(["bench", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error and error.count("\n") == 1


def bench(capsys, *arguments) -> str:
    assert main(["bench", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_kernel(capsys, tmp_path):
    text = bench(
        capsys, "kernel", "--numel", 70_000, "--repeats", 1, "--threads", 1, "--output", tmp_path
    )
    assert "| torch AdamW fused, with casts |" in text and "S=8 |" in text
    data = json.loads(next(tmp_path.glob("kernel_*.json")).read_text())
    assert all(len(timing["seconds"]) == 1 for timing in data["figures"]["timings"])


SMALL = ("--numel", 65536, "--side", 64)


def test_overlap(capsys, tmp_path):
    arguments = ["--compute-ms", "5,20", "--steps", 3, "--rounds", 1, "--intervals", 2]
    arguments += ["--only", "torch,S=2", "--output", tmp_path / "report.md"]
    text = bench(capsys, "overlap", *SMALL, *arguments)
    assert "### Compute 20.0 ms" in text and "| zenflow S=2 |" in text
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.md", "report.json", "report_0m.svg"}
    cells = json.loads((tmp_path / "report.json").read_text())["figures"]["models"][0]["cells"]
    names = {cell["contender"] for cell in cells}
    assert {"zenflow S=2", "zenflow S=2, no previews"} < names and len(cells) == 2 * 3 == 2 * len(
        names
    )
    assert all(cell["step_s"]["low"] >= cell["compute_s"] for cell in cells)


def test_overlap_across_a_link(capsys):
    arguments = ["--compute-ms", "20", "--steps", 3, "--rounds", 1, "--only", "S=1"]
    assert "a link of 1 GB/s" in bench(capsys, "overlap", *SMALL, *arguments, "--link-gbs", 1)


def test_memory(capsys):
    text = bench(capsys, "memory", *SMALL, "--steps", 2, "--only", "synchronous")
    assert "| zenflow synchronous | 0.0" in text


def test_train(capsys):
    sizes = ["--hidden", 64, "--layers", 1, "--tokens", 4, "--steps", 1, "--rounds", 1]
    text = bench(capsys, "train", *sizes, "--threads", 1, "--only", "no offload")
    assert "## 4 tokens a step, 0.6 M parameters" in text
