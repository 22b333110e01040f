"""The folder of a run, and the lock of its writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from maxbatch.run.folder.answers_file import ANSWERS_FILE
from maxbatch.run.folder.best_checkpoint import BEST
from maxbatch.run.folder.devices import DEVICES_FILE
from maxbatch.run.folder.foreign import is_own, refuse_foreign
from maxbatch.run.folder.hashes_file import HASHES_FILE
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.folder.metrics import METRICS_FILE
from maxbatch.run.folder.outcome import OUTCOME_FILE, RecordedOutcome, Status, write_outcome
from maxbatch.run.folder.position import DamagedError, committed_steps, newest_record, read_record
from maxbatch.run.folder.run_id import RUN_FILE, ForkedFrom, RunIdentity, read_identity
from maxbatch.system.errors import ConfigError, DivergedError, TrainingError, writing
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.leases import LOCK_FILE, Hold, hold_folder
from maxbatch.system.storage.storage import (
    AnyPath,
    as_path,
    is_misplaced,
    missing_folder,
    probe,
    remove_tree,
)

# of a run that was measured
CRITICAL_BATCH_FILE = PurePosixPath("critical-batch", "critical_batch.json")
SESSIONS_FILE, TRANSCRIPTS_FILE = "sessions.jsonl", "transcripts.jsonl"
REFERENCE_FILE = "reference.bin"
WARM_START = "warm_start"  # the run before the first update of reinforcement learning
_FILES = (
    LOCK_FILE,
    RUN_FILE,
    "config.yml",
    METRICS_FILE,
    SESSIONS_FILE,
    TRANSCRIPTS_FILE,
    ANSWERS_FILE,
    HASHES_FILE,
    REFERENCE_FILE,
)
TRACKERS_FILE = "trackers.json"  # the run's ids at the loggers
# by `overwrite_run`: the hold of this start, and the id, which is written anew
_KEPT_ANEW = (LOCK_FILE, RUN_FILE)
_LOOK_S = 0.2
_INSTEAD = "wait for it, or give another run_dir"
_FOLDERS = ("checkpoints", "checkpoints-damaged")


def config_file(run: AnyPath) -> AnyPath:
    """Returns the path of the config of a run; raises ConfigError if there is no run."""
    if missing := missing_folder(run):
        raise ConfigError(f"{run}: {missing}; give the run_dir of a run")
    file = run / "config.yml"
    if not file.is_file():
        raise ConfigError(f"{run}: no run here (no config.yml); give the run_dir of a run")
    return file


class RunFolder:
    """`run_dir` while one run trains in it; the host that writes to it (`writes`) holds its lock,
    or its lease.

    The lock ends with the process, even after a kill, so it never blocks the next start. The lease
    of a folder in an object store expires. A refused start removes the folder that it made.

    Attributes:
      run_dir: the path of the folder as stated, for messages.
      identity: the id of the run, made with the folder; the other hosts get it from `join`.

    Raises:
      ConfigError: the folder cannot be made, another process trains in it, something in it is of
        the wrong kind, or its `checkpoints/` holds another program's.
    """

    def __init__(self, run_dir: str, writes: bool = True) -> None:
        self.run_dir, self.path = run_dir, as_path(run_dir)
        self._is_new = self._made_identity = False
        self.identity: RunIdentity | None = None
        self._hold = self._taken(run_dir) if writes else None
        if self._hold:
            try:
                self.identity = read_identity(self.path) or self._identified()
            except BaseException:
                self._hold.close()
                raise

    @property
    def forked_from(self) -> ForkedFrom | None:
        """The state of another run that the run began with; None: it is no fork."""
        return None if self.identity is None else self.identity.forked_from

    def check(self) -> None:
        """Raises LeaseLost if another process may have taken over the folder."""
        if self._hold:
            self._hold.check()

    def _taken(self, run_dir: str) -> Hold:
        named = f"run_dir={run_dir}"
        refuse_foreign(run_dir)
        with writing(named, "give another folder"):
            self._is_new = isinstance(self.path, Path) and not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_kinds(run_dir)
            probe(self.path)
            return hold_folder(self.path, f"is training in it; {_INSTEAD}", named)

    def _identified(self) -> RunIdentity:
        """Gives a run without `run.json` the id that its newest checkpoint holds, or a new one, and
        writes it.
        """
        has_begun = any(
            (self.path / name).exists() for name in ("config.yml", METRICS_FILE, "checkpoints")
        )
        self._made_identity = not has_begun
        identity = RunIdentity.new(is_older=has_begun)
        newest = newest_record(self.path)
        if newest and newest.run_id:
            identity = dataclasses.replace(
                identity, run_id=newest.run_id, forked_from=newest.forked_from
            )
        return self._write_identity(identity)

    def _write_identity(self, identity: RunIdentity) -> RunIdentity:
        write_json(self.path / RUN_FILE, dataclasses.asdict(identity))
        return identity

    def start_together(self) -> RunIdentity:
        """Records a start on several hosts, so that the others recognise the folder; returns its
        mark.
        """
        assert self.identity is not None, "the host that writes knows its run"
        self.identity = self._write_identity(self.identity.started())
        return self.identity

    def note_session(self, reads: Mapping[str, str], software: Mapping[str, str]) -> None:
        """Records the contents, by name, that a session reads besides its training data, and its
        versions.
        """
        assert self.identity is not None, "the host that writes knows its run"
        self.identity = self._write_identity(self.identity.reading(reads).running(software))

    def join(self, started: RunIdentity, patience_s: float = 10.0) -> bool:
        """Takes over the identity of the run from the host that writes; returns whether this host
        sees its folder.

        Args:
          started: the result of `start_together` on that host.
        """
        self.identity, end = started, time.monotonic() + patience_s
        while read_identity(self.path) != started:
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def discard_run(self) -> None:
        """Removes the run's own checkpoints and lines, then gives the folder the id of a new run.

        A checkpoint that states another run's id stays. The id comes last, so that a start after a
        kill in between is refused like this one was, and removes the rest.
        """
        assert self.identity is not None, "the host that writes knows its run"
        for step in committed_steps(self.path):
            checkpoint = self.path / "checkpoints" / str(step)
            if is_own(checkpoint) and self._may_be_of_this_run(checkpoint):
                remove_tree(checkpoint)
        if (best := self.path / "checkpoints" / BEST).is_file():
            best.unlink()
        for name in (*_FILES, DEVICES_FILE, TRACKERS_FILE):
            if name not in _KEPT_ANEW:
                (self.path / name).unlink(missing_ok=True)
        self.identity = self._write_identity(RunIdentity.new(is_older=False))

    def keep_lines(self) -> None:
        """Copies the run's lines beside its damaged checkpoints, because the run begins anew
        without one.
        """
        name, lines = f"checkpoints-damaged/{METRICS_FILE}", self.path / METRICS_FILE
        if not lines.is_file():
            return
        while (self.path / name).exists():
            name += "+"
        (self.path / name).parent.mkdir(exist_ok=True)
        self.write(name, lines.read_bytes())

    def _may_be_of_this_run(self, checkpoint: AnyPath) -> bool:
        """Returns whether a checkpoint bears this run's id, or is damaged, so that none can be
        read.
        """
        assert self.identity is not None, "the host that writes knows its run"
        try:
            return self.identity.wrote(read_record(checkpoint).run_id)
        except DamagedError:
            return True

    def _check_kinds(self, run_dir: str) -> None:
        for name in (*_FILES, *_FOLDERS):
            kind = "file" if name in _FILES else "folder"
            if is_misplaced(self.path / name, is_folder=kind == "folder"):
                raise ConfigError(f"run_dir={run_dir}: {name} in it must be a {kind}; move it away")

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole or not at all."""
        write_atomically(self.path / name, content)

    def begin_again(self) -> None:
        """Removes the outcome of an earlier start: a run that takes further updates has not ended.

        A start that finds nothing to do, or is refused, leaves it.
        """
        (self.path / OUTCOME_FILE).unlink(missing_ok=True)

    def __enter__(self) -> RunFolder:
        return self

    def leave(self) -> None:
        """Lets others write to the folder, for a process that is about to end."""
        if self._hold:
            self._hold.close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._hold:
            if isinstance(error, DivergedError):
                write_outcome(self.path, RecordedOutcome(Status.DIVERGED, str(error)))
            if (
                isinstance(error, ConfigError)
                and self._made_identity
                and not (self.path / "config.yml").exists()
            ):
                # the user sees the refusal instead
                with contextlib.suppress(ConfigError, TrainingError, OSError):
                    (self.path / RUN_FILE).unlink(missing_ok=True)
            if isinstance(error, ConfigError) and self._is_new:
                self._remove_empty()
            self._hold.close()

    def _remove_empty(self) -> None:
        """Removes a folder on a disk that holds nothing but the lock."""
        assert isinstance(self.path, Path), "an object store has no empty folders"
        with contextlib.suppress(OSError):  # the user sees the refusal instead
            if os.listdir(self.path) == [LOCK_FILE]:
                (self.path / LOCK_FILE).unlink()
                self.path.rmdir()
