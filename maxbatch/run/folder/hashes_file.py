"""`hashes.jsonl` of a run: the hash of every array of its state after each update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from maxbatch.run.folder.metrics import read_step_log
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.system.storage.storage import AnyPath

HASHES_FILE = "hashes.jsonl"  # with `reproducible_sums`
ArrayHashes: TypeAlias = Mapping[str, str]  # 16 hex digits by the name of the array


def read_hashes(run_dir: AnyPath) -> dict[int, ArrayHashes]:
    """Returns the hashes of a run by update; empty if it has none.

    Raises:
      ConfigError: the file cannot be read.
    """
    return {
        record[Metric.STEP]: record["hashes"]
        for record in read_step_log(run_dir / HASHES_FILE)
        if isinstance(record.get("hashes"), dict)
    }


def differing_arrays(hashes: ArrayHashes, expected: ArrayHashes) -> list[str]:
    """Returns the names of the arrays whose hashes differ or that one side lacks, in the order of
    `expected`.
    """
    names = [*expected, *(hashes.keys() - expected.keys())]
    return [name for name in names if hashes.get(name) != expected.get(name)]


def in_words(names: list[str]) -> str:
    """Names the first of some arrays, and the number of the others."""
    others = len(names) - 1
    return names[0] + (f" and {others} more array{'s' * (others > 1)}" if others else "")
