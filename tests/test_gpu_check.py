"""``make gpu-check``: what it does where there is no GPU, and that it notices what is wrong."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zenflow
from zenflow.backends.device_kernel import TorchDeviceKernel
from zenflow.kernels.native.selective import NativeSelective
from zenflow.kernels.selective import Share, fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SECTIONS = ["Environment", "AdamW", "Oracle", "Races", "Overlap", "Peak memory", "Steady state"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_checks.correctness
    import gpu_checks.report

    return gpu_checks


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHONPATH": str(Path(zenflow.__file__).parents[1]), **environment}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped:")


def test_every_section_runs_on_the_cpu_and_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run("--device", "cpu", "--quick", "--output", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert "failed" not in text
    assert "left out" not in text


def test_a_publish_over_selected_channels_is_noticed(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(self: object, shares: Sequence[Share]) -> None:
        for side, rows, _ in shares:
            side.weight.copy_(rows)
            fingerprint(side.weight, side.fingerprint)

    for kernel in (NativeSelective, TorchDeviceKernel):
        monkeypatch.setattr(kernel, "publish", publish)
    section = checks.report.Section("Oracle", 60)
    checks.correctness.check_oracle(section, torch.device("cpu"), quick=True)
    assert section.failures


def test_what_a_section_raises_fails_it_and_the_others_run(
    checks: ModuleType, tmp_path: Path
) -> None:
    report = checks.report.Report(tmp_path / "report.md", ["# Heading"])

    def broken(section: object) -> None:
        raise ValueError("no luck")

    report.run("First", 10, broken)
    assert "no luck" in (tmp_path / "report.md").read_text()
    report.run("Second", 10, lambda section: section.check("fine", True))
    assert report.failed
    assert "1 checks passed." in (tmp_path / "report.md").read_text()


def test_a_section_that_hangs_is_ended(checks: ModuleType) -> None:
    import threading

    report = checks.report.Report(None, [])
    report.run("Hangs", 0.1, lambda _: threading.Event().wait(30))
    assert report.failed
    assert "ended after" in report.text()
