"""Each example runs as it is, offline, in a few seconds, learns, and is short enough to be read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zenflow

ROOT = Path(__file__).parents[1]
NEEDS = {
    "plain": ["torch"],
    "trainer": ["transformers", "accelerate"],
    "accelerate_loop": ["accelerate"],
    "lightning_loop": ["lightning"],
}
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}


def losses(output: str) -> list[float]:
    """The figures behind a colon that are on lines of their own."""
    return [float(found) for found in re.findall(r"^[\w ]+: (\d+\.\d+)$", output, re.MULTILINE)]


def test_every_example_is_listed() -> None:
    assert EXAMPLES.keys() == NEEDS.keys()


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs_and_learns(name: str, tmp_path: Path) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(zenflow.__file__).parents[1]),  # the one that is tested
        "PYTHONWARNINGS": "error:::zenflow",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES[name])],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = losses(done.stdout)
    assert last < first / 2 or name == "lightning_loop"
    if name in ("plain", "lightning_loop"):  # what was saved is what was evaluated
        *_, evaluated, saved = losses(done.stdout)
        assert saved == evaluated
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_short_and_says_what_it_replaces(name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "AdamW" in text.replace("ZenFlowAdamW", "")
