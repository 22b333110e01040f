"""The results of `maxbatch critical-batch`, in `RUN/critical-batch/critical_batch.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxbatch.runs.json_file import read_json

CRITICAL_BATCH_FOLDER, CRITICAL_BATCH_FILE = "critical-batch", "critical_batch.json"


def read_critical_batch(run_dir: Path) -> dict[str, Any] | None:
    """Returns the results of a run, None for a run that was not measured.

    Raises:
      ConfigError: the file cannot be read.
    """
    path = run_dir / CRITICAL_BATCH_FOLDER / CRITICAL_BATCH_FILE
    return read_json(path, f"`maxbatch critical-batch {run_dir}` writes it")
