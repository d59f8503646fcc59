"""The committed table is what the marks on the tests say."""

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "make_compatibility.py"))


def test_committed_table_equals_the_script(script: dict[str, Any]) -> None:
    committed = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    written = script["page"](script["collect"]())
    assert written == committed, "run: python docs/make_compatibility.py"


def test_a_mark_that_names_no_row_is_an_error(script: dict[str, Any], tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.covers('shapes', 'nothing')\ndef test_it():\n    pass\n"
    (tmp_path / "test_made_up.py").write_text(source)
    with pytest.raises(ValueError, match=r"tests/test_made_up\.py::test_it covers 'nothing'"):
        script["page"](script["collect"](tmp_path))


def test_a_row_is_held_only_by_tests_that_say_so(script: dict[str, Any], tmp_path: Path) -> None:
    source = (
        "import pytest\n@pytest.mark.parametrize('x', [1])\n@pytest.mark.covers('shapes')\n"
        "def test_it(x):\n    pass\ndef test_other():\n    pass\n"
    )
    (tmp_path / "test_made_up.py").write_text(source)
    page = script["page"](script["collect"](tmp_path))
    (held,) = [line for line in page.splitlines() if "test_it" in line]
    assert "**shapes**" in held
    assert "not yet" not in held
    assert "test_other" not in page
    others = [line for line in page.splitlines() if line.startswith("| **") and line != held]
    assert all("*not yet" in line for line in others)


def test_every_promise_but_the_known_ones_is_held(script: dict[str, Any]) -> None:
    """What is not held at all; shorten it, never lengthen it."""
    held = {name for test in script["collect"]() for name in test.rows}
    rows = {row.name for rows in script["FAULTS"].values() for row in rows}
    assert rows - held == set()
