"""What goes wrong around a run: interrupts, forks, refused memory, dead workers, exits."""

import gc
import logging
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zenflow
from zenflow.kernels import reference
from zenflow.runtime import pipeline, workers

pytestmark = pytest.mark.usefixtures("one_thread", "torch_kernel")


@pytest.fixture
def torch_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test can put itself into the kernel's place."""
    monkeypatch.setenv("ZENFLOW_KERNEL", "torch")


def make_optimizer(num: int = 3, **config: Any) -> tuple[nn.Module, zenflow.ZenFlowAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num)))
    settings = {"update_interval": 2, "topk_ratio": 0.1} | config
    return model, zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=settings)


def step(model: nn.Module, optimizer: zenflow.ZenFlowAdamW, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("zenflow-worker")]


SCRIPT_HEAD = """
import os, signal, sys, threading, time
os.environ["ZENFLOW_KERNEL"] = "torch"  # so that a test can put itself into its place
import torch, zenflow
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
optimizer = zenflow.ZenFlowAdamW(
    model.parameters(), lr=1e-2, config={"update_interval": 2, "topk_ratio": 0.1})
def step():
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
"""


def run_script(body: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    script = SCRIPT_HEAD + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, **arguments
    )


@pytest.mark.covers("ends with its process")
def test_ctrl_c_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_optimizer(overlap_step=False)
    expected_model, expected = make_optimizer(overlap_step=False)
    step(model, optimizer)
    sweep = reference.sweep

    def interrupting(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        monkeypatch.setattr(reference, "sweep", sweep)
        sweep(*args, **kwargs)

    monkeypatch.setattr(reference, "sweep", interrupting)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 1)
    step(expected_model, expected)
    step(expected_model, expected, 1)
    assert optimizer.stats.step == 2
    for seed in range(2, 5):
        step(model, optimizer, seed)
        step(expected_model, expected, seed)
    for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(param, other)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    optimizer.close()
    expected.close()


def test_a_second_ctrl_c_gets_through_and_the_state_is_not_trusted_after_it() -> None:
    done = run_script(
        """
        from zenflow.kernels import reference
        interrupted = threading.Event()
        def stuck(*args, **kwargs):
            while not interrupted.is_set():  # Python may take two that come at short intervals for one
                os.kill(os.getpid(), signal.SIGINT)
                interrupted.wait(2)
            time.sleep(600)
        reference.sweep = stuck
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"overlap_step": False})
        try:
            step()
        except KeyboardInterrupt:
            interrupted.set()
            print("interrupted True")
        try:
            step()
        except RuntimeError as error:
            print(error)
        """
    )
    assert "interrupted True" in done.stdout, done.stderr
    assert "restart from the last checkpoint" in done.stdout


@pytest.mark.covers("ends with its process")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_signals_end_the_process_at_once(name: str) -> None:
    script = SCRIPT_HEAD + "step()\nprint('ready', flush=True)\nwhile True: step()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(getattr(signal, name))
    process.wait(timeout=5)
    process.stdout.close()
    assert time.monotonic() - begin < 5


@pytest.mark.covers("pending steps", "ends with its process")
@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise RuntimeError('the loop')"])
def test_pending_steps_are_applied_at_exit(ending: str, tmp_path: Path) -> None:
    """The weight lies in a mapped file, so that it can be read when the process is gone."""
    path = tmp_path / "weight.bin"
    model, expected = make_optimizer(1)
    weight = model[0].weight
    path.write_bytes(weight.detach().numpy().tobytes())
    for seed in range(5):
        step(model, expected, seed)
    stale = weight.detach().clone()
    expected.close()
    assert not torch.equal(stale, weight)

    body = f"""
    model = torch.nn.Linear(64, 64)
    model.weight.data = torch.from_file({str(path)!r}, True, 64 * 64).view(64, 64)
    optimizer = zenflow.ZenFlowAdamW(
        model.parameters(), lr=1e-2, config={{"update_interval": 2, "topk_ratio": 0.1}})
    for seed in range(5):
        torch.manual_seed(seed)
        step()
    {ending}
    """
    done = run_script(body)
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3}.get(ending, 1), done.stderr
    assert torch.equal(torch.from_file(str(path), size=64 * 64).view(64, 64), weight)


@pytest.mark.covers("ends with its process")
def test_a_forked_child_is_told_and_harmless() -> None:
    done = run_script(
        """
        step(); step(); step()
        child = os.fork()
        if child == 0:
            try:
                step()
            except RuntimeError as error:
                print("child:", error, flush=True)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        for _ in range(5):
            step()
        optimizer.synchronize()
        print("parent", status, optimizer.stats.step)
        """
    )
    assert "child: this optimizer belongs to process" in done.stdout, done.stderr
    assert "parent 0 8" in done.stdout
    assert "closed without" not in done.stderr


@pytest.mark.covers("DataLoader workers")
def test_data_loader_workers_do_not_disturb() -> None:
    model, optimizer = make_optimizer()
    step(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(16, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
    assert optimizer.stats.step == 5
    optimizer.close()


def test_refused_memory_in_a_step_is_not_taken_for_a_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make_optimizer()
    step(model, optimizer)
    engine = optimizer._engine
    assert engine is not None

    def refuse(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(engine.pipeline.pool, "acquire", refuse)
    with pytest.raises(MemoryError):  # the second has a sweep of every segment
        [step(model, optimizer) for _ in range(2)]
    monkeypatch.undo()
    for use in (lambda: step(model, optimizer), optimizer.state_dict, optimizer.synchronize):
        with pytest.raises(RuntimeError, match="restart from the last checkpoint"):
            use()
    optimizer.close()


@pytest.mark.covers("streaming capture")
def test_refused_memory_while_a_gradient_is_taken_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make_optimizer(stream_gradients=True)

    def refuse(*_: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.HostPipeline, "capture", refuse)
        with pytest.raises(MemoryError):
            model(torch.ones(2, 64)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="restart from the last checkpoint"):
        optimizer.step()
    optimizer.close()


def test_another_thread_may_save_and_evaluate_while_steps_go_on() -> None:
    model, optimizer = make_optimizer()
    expected_model, expected = make_optimizer()
    errors: list[BaseException] = []
    stop = threading.Event()

    def save() -> None:
        try:
            while not stop.is_set():
                saved = optimizer.state_dict()
                assert len(saved["state"]) in (0, len(saved["param_groups"][0]["params"]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    for seed in range(100):
        step(model, optimizer, seed)
    stop.set()
    thread.join()
    for seed in range(100):
        step(expected_model, expected, seed)
    assert not errors
    optimizer.close()
    expected.close()
    for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(param, other)


def test_an_exception_in_the_loop_between_backward_and_step_changes_nothing() -> None:
    model, optimizer = make_optimizer()
    expected_model, expected = make_optimizer()
    for seed in range(4):
        for param in model.parameters():
            param.grad = torch.full_like(param, 7.0)
        optimizer.zero_grad()
        step(model, optimizer, seed)
        step(expected_model, expected, seed)
    for param, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(param, other)
    optimizer.close()
    expected.close()


@pytest.mark.covers("slow is not dead")
def test_a_hang_says_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_REPORT_EVERY_S", 0.1)
    monkeypatch.setattr(workers, "_LIVENESS_CHECK_S", 0.05)
    model, optimizer = make_optimizer(overlap_step=False, host_threads=1)
    sweep = reference.sweep
    monkeypatch.setattr(reference, "sweep", lambda *a, **k: (time.sleep(0.4), sweep(*a, **k)))
    with caplog.at_level(logging.WARNING, "zenflow"):
        step(model, optimizer)
        step(model, optimizer)
    optimizer.close()
    assert any(
        "the sweep of segment" in m and "zenflow-worker-0 runs" in m for m in caplog.messages
    )


@pytest.mark.covers("memory over time")
def test_created_and_closed_many_times_leaves_nothing() -> None:
    model, optimizer = make_optimizer()
    step(model, optimizer)
    optimizer.close()
    gc.collect()
    threads = len(worker_threads())
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        model, optimizer = make_optimizer(1)
        step(model, optimizer)
        optimizer.close()
        optimizer.close()
    gc.collect()
    assert len(worker_threads()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_closed_optimizer_says_so() -> None:
    model, optimizer = make_optimizer()
    step(model, optimizer)
    optimizer.close()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="closed"):
        step(model, optimizer)


FLAT = """
import gc, torch, zenflow
from torch import nn

def resident_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):  # without pages of files, which the system takes at will
            return int(line.split()[1]) * 1024

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 4})
for number in range(300):
    model(torch.randn(2, 512)).square().sum().backward()
    optimizer.step()
    if number % 15 == 14:
        optimizer.state_dict()
        optimizer.synchronize()
        gc.collect()
        print(resident_bytes(), sum(p.numel() for p in model.parameters()) * 12)
optimizer.close()
"""


@pytest.mark.covers("memory over time")
@pytest.mark.slow
def test_memory_is_flat_over_steps_saves_and_evaluations() -> None:
    """In a process of its own: what other tests have left in the allocator comes and goes."""
    done = subprocess.run(
        [sys.executable, "-c", FLAT],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    sizes = [int(line.split()[0]) for line in done.stdout.splitlines()]
    state_bytes = int(done.stdout.split()[-1])
    assert len(sizes) == 20
    assert statistics.median(sizes[10:]) - statistics.median(sizes[4:10]) < 0.1 * state_bytes
