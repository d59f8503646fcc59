"""The convergence bench.

    python -m benchmarks.convergence run [--jobs 2] [--budget MINUTES] [--only A] [--only B:adamw]
    python -m benchmarks.convergence observe [--only A] [--only staleness]
    python -m benchmarks.convergence report
    python -m benchmarks.convergence list

``run`` carries out what has no result yet and can be stopped and started again at any time.
"""

import argparse
import math
import sys
from pathlib import Path

from benchmarks.convergence.plan import all_runs, chosen
from benchmarks.convergence.runner import run_all

ROOT = Path(__file__).parents[2]


def main() -> None:
    arguments = _parse()
    if arguments.command == "observe":
        from benchmarks.convergence.observations.observe import observe_all

        observe_all(arguments.results, arguments.cache, arguments.only, _say)
        return
    runs = chosen(all_runs(), arguments.only)
    if arguments.seeds is not None:
        runs = [run for run in runs if run.seed < arguments.seeds]
    if arguments.command == "run":
        run_all(
            runs,
            arguments.results,
            arguments.cache,
            jobs=arguments.jobs,
            budget_s=60 * arguments.budget,
            say=_say,
        )
    elif arguments.command == "report":
        from benchmarks.convergence.report import write_report

        write_report(arguments.results, ROOT / "docs", _say)
    else:
        for run in runs:
            state = "done" if run.path(arguments.results).exists() else "missing"
            _say(f"{state:8} {run.file_name}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("command", choices=("run", "observe", "report", "list"))
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--budget", type=float, default=math.inf, help="minutes")
    parser.add_argument("--only", action="append", default=[], metavar="TASK[:METHOD]")
    parser.add_argument("--seeds", type=int, help="only the first so many")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/convergence")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/convergence")
    return parser.parse_args()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
