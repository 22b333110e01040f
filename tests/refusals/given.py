"""Folders and files that rows of `table.txt` take for given, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.helpers.reports import write_run


def _runs(folder: Path) -> None:
    """Writes `runs/a`, a run of 2 updates, and `broken`, whose metrics are no metrics."""
    write_run(folder / "runs" / "a", 2)
    write_run(folder / "broken", 2)
    (folder / "broken" / "metrics.jsonl").write_text('{"stp": 1}\n{"step": 2}\n')


GIVEN: dict[str, Callable[[Path], None]] = {"runs": _runs}
