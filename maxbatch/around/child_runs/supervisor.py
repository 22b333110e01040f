"""Child runs: `maxbatch train` in processes that end with the command that started them.

A child's exit code, and the `outcome.json` of a run that diverged, show how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Generic, NamedTuple, Protocol, TypeVar

from maxbatch.around.child_runs.training_process import TrainingExit
from maxbatch.run.folder.outcome import (
    OUTCOME_FILE,
    RecordedOutcome,
    Status,
    read_outcome,
    write_outcome,
)
from maxbatch.system.errors import (
    EXIT_DONE,
    EXIT_PASSING_FAULT,
    EXIT_STOPPED,
    ConfigError,
    PassingFault,
    writing,
)
from maxbatch.system.processes.stopping import Stopping
from maxbatch.system.storage.leases import leased
from maxbatch.system.storage.locks import take_lock
from maxbatch.system.storage.storage import AnyPath, kept_here, look_period
from maxbatch.system.terminal.folding import counted

_POLL_S = 0.1
_MOST_FAULTS = 3  # of disks and stores in a row, with no run that ends in between
_LOCK_S = 20  # wait for the children of a killed command to end
T = TypeVar("T")


@contextlib.contextmanager
def locked(folder: AnyPath, does: str) -> Iterator[BinaryIO]:
    """Holds the lock of a command on the folder of its runs, which children inherit: it is free
    once all have ended.

    Args:
      does: the command's work in it, for the message to another command.

    Raises:
      ConfigError: another command holds it.
    """
    refusal = f"{does} in it; wait for it"
    with leased(folder, refusal):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(kept_here(folder) / ".lock", _LOCK_S)
        if lock is None:
            raise ConfigError(f"{folder}: another command {refusal}")
        with lock:
            yield lock


@dataclasses.dataclass(frozen=True)
class ChildRun(Generic[T]):
    """A run to train in a process of its own."""

    subject: T  # its purpose: a trial, a branch
    run_dir: AnyPath
    arguments: Sequence[str]  # of `maxbatch train`


class ChildEnd(NamedTuple):
    """How the process of a child run ended."""

    status: Status | None  # None if it was stopped, and the same command continues it
    # one line, "" for a run that is done or stopped; the fault of a disk or a store that stopped it
    reason: str
    exit_code: int  # negative for the signal that killed it
    seconds: float  # from its start to its end


class Child(Protocol):
    """A process that trains a run, on this machine or on another."""

    def poll(self) -> TrainingExit | None:
        """Returns how the process ended; None while it runs."""

    def terminate(self) -> None:
        """Asks the process to save and stop."""

    def close(self) -> None:
        """Kills the process if it still runs."""


class ChildRuns(Protocol[T]):
    """The runs that a command has to train."""

    def next(self) -> ChildRun[T] | None:
        """Returns a run to start now; None if none may start yet."""

    def is_exhausted(self) -> bool:
        """Returns whether nothing is left to start, now or later; called while no child runs."""

    def watch(self, run: ChildRun[T]) -> str | None:
        """Checks a running child several times a second; returns the reason to prune it, or
        None.
        """

    def ended(self, run: ChildRun[T], end: ChildEnd) -> None:
        """Records how a run ended, and keeps one that was stopped for a later `next`."""


@dataclasses.dataclass
class _Started(Generic[T]):
    run: ChildRun[T]
    child: Child
    since: float
    pruned: RecordedOutcome | None = None
    looked_at: float = 0.0

    def end(self, ended: TrainingExit, is_stopping: bool) -> ChildEnd:
        status, reason = self.pruned or self._outcome(ended)
        # the signal may have arrived before it could save
        if is_stopping and status == Status.FAILED:
            status, reason = None, ""
        return ChildEnd(status, reason, ended.code, time.monotonic() - self.since)

    def _outcome(self, ended: TrainingExit) -> tuple[Status | None, str]:
        code = ended.code
        if code == EXIT_DONE:
            return Status.DONE, ""
        if code == EXIT_STOPPED:
            return None, ""
        # no outcome of the run: it continues once there is room, or the store answers
        if code == EXIT_PASSING_FAULT:
            return None, ended.last_line or "its disk or its store failed"
        if recorded := read_outcome(self.run.run_dir):
            return recorded
        if code < 0:
            return Status.FAILED, f"killed by {signal.Signals(-code).name}"
        return Status.FAILED, ended.last_line or f"exit code {code}"


class Supervisor(Generic[T]):
    """Trains child runs, `parallel` at a time, each once.

    A run that a full disk or a store stopped is started again after the others, as its `ChildRuns`
    offers it again. After `_MOST_FAULTS` such faults in a row no further run starts.

    Args:
      start: starts the process of a run, from its folder and the arguments of `maxbatch train`.
    """

    def __init__(
        self,
        runs: ChildRuns[T],
        start: Callable[[AnyPath, Sequence[str]], Child],
        parallel: int,
        say: Callable[[str], None],
    ) -> None:
        self._runs, self._start_child, self._parallel, self._say = runs, start, parallel, say
        self._children: list[_Started[T]] = []
        self._faults: list[str] = []  # of disks and stores, since a run last ended by itself

    def train(self, stop: Stopping) -> bool:
        """Trains until nothing is left (True), or until a signal requests a stop and every child
        has saved (False).

        Raises:
          PassingFault: a disk or a store fails run after run.
        """
        try:
            while not stop.is_asked:
                self._collect(stop)
                self._watch()
                may_start = len(self._faults) < _MOST_FAULTS
                if not may_start and not self._children:
                    raise PassingFault(
                        f"{self._faults[-1]} ({_MOST_FAULTS} such faults in a row); nothing is lost"
                    )
                while (
                    may_start
                    and len(self._children) < self._parallel
                    and (run := self._runs.next())
                ):
                    self._start(run)
                if not self._children and self._runs.is_exhausted():
                    return True
                time.sleep(_POLL_S)
            running = len(self._children)
            does = "saves and stops" if running == 1 else "save and stop"
            self._say(f"{stop.signal_name}: {counted(running, 'run')} {does}")
            for started in self._children:
                started.child.terminate()
            while self._children:
                self._collect(stop)
                time.sleep(_POLL_S)
            return False
        finally:
            for started in self._children:
                started.child.close()

    def _start(self, run: ChildRun[T]) -> None:
        (run.run_dir / OUTCOME_FILE).unlink(missing_ok=True)
        child = self._start_child(run.run_dir, run.arguments)
        self._children.append(_Started(run, child, time.monotonic()))

    def _collect(self, stop: Stopping) -> None:
        for started in list(self._children):
            if (ended := started.child.poll()) is not None:
                self._children.remove(started)
                end = started.end(ended, stop.is_asked)
                is_passing = end.status is None and end.reason
                self._faults = (
                    [*self._faults, f"{started.run.run_dir}: {end.reason}"] if is_passing else []
                )
                self._runs.ended(started.run, end)

    def _watch(self) -> None:
        for started in self._children:
            run = started.run
            if time.monotonic() < started.looked_at + look_period(run.run_dir):
                continue
            started.looked_at = time.monotonic()
            if not started.pruned and (reason := self._runs.watch(run)):
                started.pruned = RecordedOutcome(Status.PRUNED, reason)
                # first, so that a kill in between does not undo it
                write_outcome(run.run_dir, started.pruned)
                started.child.terminate()
