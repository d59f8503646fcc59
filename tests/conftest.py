"""What tests share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One compute thread, so that reductions are added in one order throughout a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NUMBERS_ONLY = ("backends", "fuzz", "oracle", "simulated", "test_adamw_equality.py")


@pytest.fixture(autouse=True)
def no_search_for_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parameters are in no module, looking for one among the objects of a whole test run takes
    longer than the test, thousands of times."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in NUMBERS_ONLY:
        monkeypatch.setattr("zenflow.optimizer.modules_over", lambda params: [])


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later search, by the garbage collector and for modules."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-product", action="store_true", help="compare all configurations with the oracle"
    )
