"""The metrics that a run left on disk, read without JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxbatch.system.errors import ConfigError


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, one per update; none where there is no file yet.

    A torn last line is left out: the run was killed while it wrote it, or is writing it now.

    Raises:
      ConfigError: the file cannot be read, or another line is no record of an update.
    """
    path = run_dir / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    records = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ConfigError(f"{path}:{number}: must be a JSON object with a whole `step`")
    return records


def _record(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
