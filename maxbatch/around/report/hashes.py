"""The states of runs compared by their hashes (`reproducible_sums`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from maxbatch.around.report.runs import ReportedRun
from maxbatch.run.folder.metrics import read_step_log
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.run_folder import HASHES_FILE
from maxbatch.system.terminal.folding import counted

Hashes: TypeAlias = Mapping[int, Mapping[str, str]]  # by update and array


def hash_lines(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns a line for each run after the first with hashes: the first update, and its first
    array, that differs from that run.
    """
    hashed = [(run.name, hashes) for run in runs if (hashes := _hashes_of(run))]
    if len(hashed) < 2:
        return []
    (name, expected), *others = hashed
    return [f"{other}: {difference(name, expected, hashes)}" for other, hashes in others]


def difference(name: str, expected: Hashes, hashes: Hashes) -> str:
    """Describes the first difference of a run's hashes from those `expected` of the run `name`."""
    common = sorted(expected.keys() & hashes.keys())
    if not common:
        return f"no update has hashes here and in {name}"
    for step in common:
        if expected[step] != hashes[step]:
            arrays = [*expected[step], *(hashes[step].keys() - expected[step].keys())]
            differing = [a for a in arrays if expected[step].get(a) != hashes[step].get(a)]
            more = f" and {counted(len(differing) - 1, 'more array')}" * (len(differing) > 1)
            return (
                f"update {step:,} is the first whose state differs from {name}: "
                f"{differing[0]}{more}"
            )
    return (
        f"the states after updates {common[0]:,} to {common[-1]:,} are those of {name}, to the "
        "last bit"
    )


def _hashes_of(run: ReportedRun) -> Hashes:
    hashes = {}
    for record in read_step_log(run.path / HASHES_FILE):
        of_arrays = record.get("hashes")
        if isinstance(of_arrays, dict):
            hashes[record[Metric.STEP]] = of_arrays
    return hashes
