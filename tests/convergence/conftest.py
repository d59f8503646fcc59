"""`small` and `broken` are modules of this folder, `benchmarks` one of the repository's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
