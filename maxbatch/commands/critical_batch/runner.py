"""The branches as child runs, one after the other, and how far they are: a progress bar, or a line for each branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from rich.console import Console

from maxbatch.commands.critical_batch.branches import Branches
from maxbatch.commands.critical_batch.plan import Branch
from maxbatch.runs.outcome import Status
from maxbatch.runs.supervisor import ChildEnd, ChildRun
from maxbatch.system.bars import LinesAboveBar
from maxbatch.system.errors import EXIT_INPUT, ConfigError, TrainingError


class BranchRuns:
    """The branches of a plan for the supervisor; each is trained under `lock` and with `train_flags`."""

    def __init__(
        self, branches: Branches, lock: BinaryIO, train_flags: Sequence[str], progress: BranchProgress
    ) -> None:
        self._branches, self._lock, self._flags, self._progress = branches, lock, train_flags, progress
        self._left = branches.left()
        self._num_bytes = -1  # of the metrics that were shown last

    def next(self) -> ChildRun[Branch] | None:
        if not self._left:
            return None
        branch = self._left[0]
        folder = self._branches.folder(branch)
        arguments = [str(folder / "config.yml"), *self._branches.overrides(branch), *self._flags]
        return ChildRun(branch, folder, arguments, self._lock)

    def is_exhausted(self) -> bool:
        return not self._left

    def watch(self, run: ChildRun[Branch]) -> None:
        metrics = run.run_dir / "metrics.jsonl"
        num_bytes = metrics.stat().st_size if metrics.exists() else 0
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            self._progress.show(run.subject, self._branches.samples_done(run.subject))

    def ended(self, run: ChildRun[Branch], end: ChildEnd) -> None:
        """Records a branch that is done or diverged."""
        if end.status is None:  # only this branch was stopped
            self._left = []
        elif end.exit_code < 0:
            raise TrainingError(f"{run.run_dir}: its process was {end.reason}; the same command continues")
        elif end.status == Status.FAILED:
            error = ConfigError if end.exit_code == EXIT_INPUT else TrainingError
            raise error(f"{run.run_dir}: {end.reason}")
        else:
            self._branches.finish(run.subject, end.status, end.reason)
            self._left.pop(0)


class BranchProgress(LinesAboveBar):
    """How far the branches are, all together: a bar on a terminal, elsewhere a line for each branch."""

    def __init__(self, console: Console, branches: Branches) -> None:
        super().__init__(console)
        self._branches = branches
        self._current: Branch | None = None
        total = sum(branch.samples for branch in branches.all)
        self._task = self._bar.add_task("", total=total, completed=self._samples_done())

    def _samples_done(self) -> int:
        return sum(branch.samples for branch in self._branches.all if self._branches.is_done(branch))

    def show(self, branch: Branch, samples: int) -> None:
        """Shows the branch that trains and how many of its samples it was trained on."""
        index = self._branches.all.index(branch) + 1
        name = f"branch {index}/{len(self._branches.all)}: step {branch.fork.step:,}, batch {branch.batch_size:,}"
        self._bar.update(self._task, completed=self._samples_done() + samples, description=name)
        if self._bar.disable and branch != self._current:
            self._lines.print(name + (f", from sample {samples:,} on" if samples else ""))
        self._current = branch
