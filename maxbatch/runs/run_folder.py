"""The folder of a run: who may write to it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from maxbatch.runs.outcome import OUTCOME_FILE, RecordedOutcome, Status, write_outcome
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError, DivergedError, LeaseLost, cannot_write
from maxbatch.system.leases import Lease, hold_lease
from maxbatch.system.locks import is_lock_on, take_lock
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import AnyPath, as_path, probe

CRITICAL_BATCH_FILE = PurePosixPath("critical-batch", "critical_batch.json")  # of a run that was measured
_LOCK = ".lock"
_FILES = (_LOCK, "config.yml", "metrics.jsonl", "transcripts.jsonl")
_INSTEAD = "wait for it, or give another run_dir"
_FOLDERS = ("checkpoints", "checkpoints-damaged")


class RunFolder:
    """`run_dir` while one run trains in it; the host that writes to it (`writes`) holds its lock, or its lease.

    The lock goes with the process, also when it is killed, so nothing is left that blocks the next start. The lease of
    a folder in an object store lapses.

    Raises:
      ConfigError: the folder cannot be made, another process trains in it, or something in it is of the wrong kind.
    """

    def __init__(self, run_dir: str, writes: bool = True) -> None:
        self.path: AnyPath = as_path(run_dir)
        self._lock: BinaryIO | Lease | None = None
        if writes:
            remote = isinstance(self.path, RemotePath)
            self._lock = self._taken_lease(run_dir) if remote else self._taken_lock(run_dir)

    def _taken_lease(self, run_dir: str) -> Lease:
        assert isinstance(self.path, RemotePath)
        probe(self.path)
        return hold_lease(self.path, f"is training in it; {_INSTEAD}", named=f"run_dir={run_dir}")

    def check(self) -> None:
        """Raises LeaseLost once another process may have taken the folder over."""
        if isinstance(self._lock, Lease):
            self._lock.check()
        elif self._lock and isinstance(self.path, Path) and not is_lock_on(self._lock, self.path / _LOCK):
            raise LeaseLost(f"{self.path}: its lock was removed, and another process may train in it; this one stops")

    def _taken_lock(self, run_dir: str) -> BinaryIO:
        assert isinstance(self.path, Path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_kinds(run_dir)
            lock = take_lock(self.path / _LOCK)
        except OSError as error:
            raise cannot_write(f"run_dir={run_dir}", error, "give another folder") from error
        if lock is None:
            raise ConfigError(f"run_dir={run_dir}: another process is training in it; {_INSTEAD}")
        return lock

    def _check_kinds(self, run_dir: str) -> None:
        assert isinstance(self.path, Path)
        for name in (*_FILES, *_FOLDERS):
            path, kind = self.path / name, "file" if name in _FILES else "folder"
            if os.path.lexists(path) and not (path.is_file() if kind == "file" else path.is_dir()):
                raise ConfigError(f"run_dir={run_dir}: {name} in it must be a {kind}; move it away")

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole or not at all."""
        write_atomically(self.path / name, content)

    def __enter__(self) -> RunFolder:
        if self._lock:
            (self.path / OUTCOME_FILE).unlink(missing_ok=True)  # a run that starts again has not ended
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._lock:
            if isinstance(error, DivergedError):
                write_outcome(self.path, RecordedOutcome(Status.DIVERGED, str(error)))
            self._lock.close()
