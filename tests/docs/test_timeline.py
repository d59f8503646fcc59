"""The committed picture is what its script draws."""

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_committed_picture_equals_the_script():
    timeline = runpy.run_path(str(DOCS / "make_timeline.py"))["timeline"]
    committed = (DOCS / "timeline.svg").read_text(encoding="utf-8")
    assert timeline() == committed, "run: python docs/make_timeline.py"


def test_picture_is_well_formed_and_names_its_lanes():
    root = ET.parse(DOCS / "timeline.svg").getroot()
    words = {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"device", "link", "host", "slot", "sweep", "stall"} <= words
    assert any("publish" in text for text in words)
    assert any("Schematic" in text for text in words)
