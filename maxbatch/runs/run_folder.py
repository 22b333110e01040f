"""The folder of a run: who may write to it, and the metrics in it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from maxbatch.runs.outcome import OUTCOME_FILE, RecordedOutcome, Status, write_outcome
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError, DivergedError
from maxbatch.system.locks import take_lock


class RunFolder:
    """`run_dir` while one run trains in it.

    The lock goes with the process, also when it is killed, so nothing is left that blocks the next start.

    Args:
      run_dir: the folder.
      writes: whether this host writes to it, the one that holds the lock.

    Raises:
      ConfigError: the folder cannot be made, or another process trains in it.
    """

    def __init__(self, run_dir: str, writes: bool = True) -> None:
        self.path = Path(run_dir).expanduser().absolute()
        self._lock: BinaryIO | None = self._taken_lock(run_dir) if writes else None

    def _taken_lock(self, run_dir: str) -> BinaryIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(self.path / ".lock")
        except OSError as error:
            raise ConfigError(
                f"run_dir={run_dir}: cannot be written ({error.strerror}); give another folder"
            ) from error
        if lock is None:
            raise ConfigError(
                f"run_dir={run_dir}: another process is training in it; wait for it, or give another run_dir"
            )
        return lock

    def write(self, name: str, text: str) -> None:
        """Writes a file whole or not at all."""
        write_atomically(self.path / name, text)

    def __enter__(self) -> RunFolder:
        if self._lock:
            (self.path / OUTCOME_FILE).unlink(missing_ok=True)  # a run that starts again has not ended
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._lock:
            if isinstance(error, DivergedError):
                write_outcome(self.path, RecordedOutcome(Status.DIVERGED, str(error)))
            self._lock.close()


class MetricsLog:
    """`metrics.jsonl`: one line per update, and never two for one step; or another file that is kept like it.

    Args:
      folder: the run's folder.
      step: updates done at the start. Later lines, of updates that will be redone, are dropped, and so is a torn
        last line.
    """

    def __init__(self, folder: RunFolder, step: int, name: str = "metrics.jsonl") -> None:
        path = folder.path / name
        old = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in old if 0 < _step_of(line) <= step]
        if kept != old:
            folder.write(name, "".join(kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  closed by close()

    def append(self, record: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Returns once every line so far is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> int:
    """The step of a line of metrics, 0 for a torn one."""
    if not line.endswith("\n"):
        return 0
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
