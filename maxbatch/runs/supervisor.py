"""Child runs: `maxbatch train` in processes that end with the command that started them.

A child's exit code, and the `outcome.json` of a run that diverged, show how it ended.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, Protocol, TypeVar

from maxbatch.runs.outcome import OUTCOME_FILE, RecordedOutcome, Status, read_outcome, write_outcome
from maxbatch.system.child_process import last_line, start_child
from maxbatch.system.errors import EXIT_DONE, EXIT_STOPPED
from maxbatch.system.folding import counted
from maxbatch.system.stopping import Stopping
from maxbatch.system.storage import AnyPath, kept_here, look_period, send

LOG_FILE = "log.txt"
_POLL_S = 0.1
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ChildRun(Generic[T]):
    """A run to train in a process of its own."""

    subject: T  # its purpose: a trial, a branch
    run_dir: AnyPath  # the folder of `log.txt`, its output
    arguments: Sequence[str]  # of `maxbatch train`
    claim: BinaryIO  # an open lock, which the child holds too: while either lives, no other process starts the run

    @property
    def log(self) -> Path:
        """The file of this machine for the output of the child."""
        return kept_here(self.run_dir) / LOG_FILE


class ChildEnd(NamedTuple):
    """How the process of a child run ended."""

    status: Status | None  # None if it was stopped, and the same command continues it
    reason: str  # one line, "" for a run that is done or stopped
    exit_code: int  # negative for the signal that killed it
    seconds: float  # how long the process lived


class ChildRuns(Protocol[T]):
    """The runs that a command has to train."""

    def next(self) -> ChildRun[T] | None:
        """Returns a run to start now; None if none may start yet."""

    def is_exhausted(self) -> bool:
        """Returns whether nothing is left to start, now or later; called while no child runs."""

    def watch(self, run: ChildRun[T]) -> str | None:
        """Checks a running child several times a second; returns the reason to prune it, or None."""

    def ended(self, run: ChildRun[T], end: ChildEnd) -> None:
        """Records how a run ended, while the claim on it is still held."""


@dataclasses.dataclass
class _Child(Generic[T]):
    run: ChildRun[T]
    process: subprocess.Popen[bytes]
    started: float
    pruned: RecordedOutcome | None = None
    looked_at: float = 0.0

    def end(self, is_stopping: bool) -> ChildEnd:
        status, reason = self.pruned or self._outcome()
        if is_stopping and status == Status.FAILED:  # the signal may have arrived before it could save
            status, reason = None, ""
        return ChildEnd(status, reason, self.process.returncode, time.monotonic() - self.started)

    def _outcome(self) -> tuple[Status | None, str]:
        code = self.process.returncode
        if code == EXIT_DONE:
            return Status.DONE, ""
        if code == EXIT_STOPPED:
            return None, ""
        if recorded := read_outcome(self.run.run_dir):
            return recorded
        if code < 0:
            return Status.FAILED, f"killed by {signal.Signals(-code).name}"
        with open(self.run.log, "rb") as log:
            return Status.FAILED, last_line(log) or f"exit code {code}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()


class Supervisor(Generic[T]):
    """Trains child runs, `parallel` at a time. It starts each run once, without retries."""

    def __init__(self, runs: ChildRuns[T], parallel: int, say: Callable[[str], None]) -> None:
        self._runs, self._parallel, self._say = runs, parallel, say
        self._children: list[_Child[T]] = []

    def train(self, stop: Stopping) -> bool:
        """Trains until nothing is left (True), or until a signal requests a stop and every child has saved (False)."""
        try:
            while not stop.is_asked:
                self._collect(stop)
                self._watch()
                while len(self._children) < self._parallel and (run := self._runs.next()):
                    self._start(run)
                if not self._children and self._runs.is_exhausted():
                    return True
                time.sleep(_POLL_S)
            running = len(self._children)
            does = "saves and stops" if running == 1 else "save and stop"
            self._say(f"{stop.signal_name}: {counted(running, 'run')} {does}")
            for child in self._children:
                child.process.terminate()
            while self._children:
                self._collect(stop)
                time.sleep(_POLL_S)
            return False
        finally:
            for child in self._children:
                child.close()
                child.run.claim.close()

    def _start(self, run: ChildRun[T]) -> None:
        (run.run_dir / OUTCOME_FILE).unlink(missing_ok=True)
        with open(run.log, "ab") as log:
            process = start_child(["train", *run.arguments], log, keep_open=[run.claim.fileno()])
        self._children.append(_Child(run, process, time.monotonic()))

    def _collect(self, stop: Stopping) -> None:
        for child in [child for child in self._children if child.process.poll() is not None]:
            self._children.remove(child)
            child.close()
            send(child.run.log, child.run.run_dir / LOG_FILE)
            self._runs.ended(child.run, child.end(stop.is_asked))

    def _watch(self) -> None:
        for child in self._children:
            if time.monotonic() < child.looked_at + look_period(child.run.run_dir):
                continue
            child.looked_at = time.monotonic()
            if not child.pruned and (reason := self._runs.watch(child.run)):
                child.pruned = RecordedOutcome(Status.PRUNED, reason)
                write_outcome(child.run.run_dir, child.pruned)  # first, so that a kill in between does not undo it
                child.process.terminate()
