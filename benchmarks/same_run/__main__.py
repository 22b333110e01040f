"""`python -m benchmarks.same_run NAME ...`: trains with another program and with what import makes
of its config.

Both trainings begin with the same parameters and read the same rows, in float32 on one CPU device.
The other program runs in a virtual environment, which is made if it is missing. Losses, gradient
norms and rates of every update are compared, and the parameters after the last one. The figures are
written to `benchmarks/same_run/results/NAME.json` and to the table of `docs/import.md`.

`--check` repeats a few comparisons with fewer updates, writes nothing, and fails if a figure is
beyond its tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.measurement import BenchmarkError
from benchmarks.same_run import results
from benchmarks.same_run.cases import CASES
from benchmarks.same_run.environments import PROGRAMS, NoPython, python_of, versions
from benchmarks.same_run.figures import Differences

_SEED = 0
_CHECKED_UPDATES = 5


def main(argv: list[str] | None = None) -> int:
    """Compares the named runs; returns 1 if one could not be compared or is beyond its
    tolerances.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_run", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="comparisons, as --list prints them"
    )
    parser.add_argument("--all", action="store_true", help="every comparison")
    parser.add_argument("--list", action="store_true", help="print the names of all comparisons")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path("environments"),
        metavar="DIR",
        help=f"folder of the virtual environments {', '.join(PROGRAMS)}, made if they are missing",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="repeat CI's comparisons or the named ones, write nothing",
    )
    parser.add_argument("--table", action="store_true", help="write the table of the page alone")
    arguments = parser.parse_args(argv)
    names = arguments.names
    if unknown := set(names) - CASES.keys():
        parser.error(
            f"no comparison is called {', '.join(sorted(unknown))}; --list prints the names"
        )
    if arguments.list:
        print(*(f"{name}  {case.title}" for name, case in CASES.items()), sep="\n")
        return 0
    if arguments.all or (arguments.check and not names):
        names = [name for name, case in CASES.items() if arguments.all or case.checked]
    if not names and not arguments.table:
        parser.error("name a comparison, or state --all, --check, --list or --table")

    jax.config.update("jax_platforms", "cpu")
    failed = [name for name in names if not _compare(name, arguments.environments, arguments.check)]
    if not arguments.check:
        results.write_table()
    if failed:
        print(f"same_run: not the same, or not compared: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _compare(name: str, environments: Path, is_check: bool) -> bool:
    """Makes one comparison; returns whether its figures are those that its row promises."""
    case, began = CASES[name], time.perf_counter()
    try:
        python = python_of(case.program, environments)
        program = importlib.import_module(f"benchmarks.same_run.{case.program}")
        with tempfile.TemporaryDirectory(prefix="maxbatch-same-") as folder:
            updates = min(case.updates, _CHECKED_UPDATES) if is_check else case.updates
            pair = program.train_both(case, python, Path(folder), updates, _SEED)
    except NoPython as error:
        print(f"same_run: {name}: skipped: {error}")
        return is_check
    except BenchmarkError as error:
        print(f"same_run: {name}: {error}", file=sys.stderr)
        return False
    found = pair.differences
    beyond = found.beyond(results.TOLERANCES)
    print(f"same_run: {name}: {_figures(found)}; {time.perf_counter() - began:.0f} s")
    for array, ratio in found.arrays.items():
        if ratio > results.TOLERANCES.array:
            print(f"same_run: {name}: {array} differs by {ratio:.1e} of what the updates changed")
    if not is_check:
        results.write(name, pair, found, versions(case.program, python), _SEED)
    return bool(beyond) == bool(case.differs)


def _figures(found: Differences) -> str:
    return ", ".join(f"{each} {getattr(found, each):.1e}" for each in vars(results.TOLERANCES))


if __name__ == "__main__":
    sys.exit(main())
