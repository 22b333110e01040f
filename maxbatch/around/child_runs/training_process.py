"""`maxbatch train` in a process of its own, whose output goes to `log.txt` of its run folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from maxbatch.system.processes.child_process import last_line, start_child
from maxbatch.system.storage.storage import AnyPath, kept_here, send

LOG_FILE = "log.txt"


class TrainingExit(NamedTuple):
    """How a training process ended."""

    code: int  # negative for the signal that killed it
    last_line: str  # of its output


class TrainingProcess:
    """A process of this machine, which ends with the process that started it.

    Args:
      lock: an open lock that the process holds too, so that no other command starts the run before
        it has ended.
    """

    def __init__(self, lock: BinaryIO, run_dir: AnyPath, arguments: Sequence[str]) -> None:
        self._run_dir, self._log = run_dir, kept_here(run_dir) / LOG_FILE
        with open(self._log, "ab") as log:
            self._process = start_child(
                ["train", *arguments], log, keep_open=[lock.fileno()], tells_passing_faults=True
            )

    def poll(self) -> TrainingExit | None:
        """Returns how the process ended, and copies its output to the run folder; None while it
        runs.
        """
        code = self._process.poll()
        if code is None:
            return None
        self.close()
        send(self._log, self._run_dir / LOG_FILE)
        with open(self._log, "rb") as log:
            return TrainingExit(code, last_line(log))

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
