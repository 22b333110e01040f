"""The states of runs compared by their hashes (`reproducible_sums`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maxbatch.around.report.runs import ReportedRun
from maxbatch.run.folder.hashes_file import ArrayHashes, differing_arrays, in_words, read_hashes


def hash_lines(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns a line for each run after the first with hashes: the first update, and its first
    array, that differs from that run.
    """
    hashed = [(run.name, hashes) for run in runs if (hashes := read_hashes(run.path))]
    if len(hashed) < 2:
        return []
    (name, expected), *others = hashed
    return [f"{other}: {_difference(name, expected, hashes)}" for other, hashes in others]


def _difference(
    name: str, expected: Mapping[int, ArrayHashes], hashes: Mapping[int, ArrayHashes]
) -> str:
    """Describes the first difference of a run's hashes from those `expected`, of the run `name`."""
    common = sorted(expected.keys() & hashes.keys())
    if not common:
        return f"no update has hashes here and in {name}"
    for step in common:
        if arrays := differing_arrays(hashes[step], expected[step]):
            return (
                f"update {step:,} is the first whose state differs from {name}: {in_words(arrays)}"
            )
    return (
        f"the states after updates {common[0]:,} to {common[-1]:,} are those of {name}, to the "
        "last bit"
    )
