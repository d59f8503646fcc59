"""Compare random sequences with the oracle for a time: ``python tests/fuzz/fuzz.py --seconds 600``.

Prints a script for the first that fails, and ends with 1.
"""

import argparse
import itertools
import logging
import secrets
import sys
from pathlib import Path
from time import monotonic

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))  # for `runs`

from sequences import draw, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, help="number to begin with; random without it")
    options = parser.parse_args()
    first = secrets.randbelow(10**9) if options.first is None else options.first
    torch.set_num_threads(1)  # so that reductions are added in one order
    logging.getLogger("zenflow").setLevel(logging.ERROR)  # edits and skipped steps are told
    print(f"sequences from number {first} for {options.seconds:g} s")
    until = monotonic() + options.seconds
    for number in itertools.count(first):
        found = report(draw(number))
        if found is not None:
            print(f"number {number}: {found}")
            return 1
        if monotonic() > until:
            print(f"{number - first + 1} sequences, no difference")
            return 0
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
