"""The driver is imported as a module of this folder, and what it compares with from its neighbour."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "oracle"):
    sys.path.insert(0, str(folder))
