"""The results of `maxbatch critical-batch`, in `RUN/critical-batch/critical_batch.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxbatch.system.errors import ConfigError

CRITICAL_BATCH_FOLDER, CRITICAL_BATCH_FILE = "critical-batch", "critical_batch.json"


def read_critical_batch(run_dir: Path) -> dict[str, Any] | None:
    """Returns the results of a run, None for a run that was not measured.

    Raises:
      ConfigError: the file cannot be read.
    """
    path = run_dir / CRITICAL_BATCH_FOLDER / CRITICAL_BATCH_FILE
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); `maxbatch critical-batch {run_dir}` writes it"
        ) from None
