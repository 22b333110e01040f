"""What a person sees while branches train: a progress bar on a terminal, a line per branch otherwise."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from maxbatch.commands.critical_batch.branches import Branches
from maxbatch.commands.critical_batch.plan import Branch


class Progression:
    """Shows how far the branches are, all together.

    Args:
      console: where to.
      branches: the branches.
    """

    def __init__(self, console: Console, branches: Branches) -> None:
        self._console, self._branches = console, branches
        self._current: Branch | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("left"), console=Console(highlight=False))
            total = sum(branch.samples for branch in branches.all)
            self._task = self._bar.add_task("", total=total, completed=self._done_before())

    def _done_before(self) -> int:
        return sum(branch.samples for branch in self._branches.all if self._branches.is_done(branch))

    def show(self, branch: Branch, samples: int) -> None:
        """Show a branch that trains and the samples it has behind it."""
        index = self._branches.all.index(branch) + 1
        name = f"branch {index}/{len(self._branches.all)}: step {branch.fork.step:,}, batch {branch.batch_size:,}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done_before() + samples, description=name)
        elif branch != self._current:
            resumed = f", from sample {samples:,} on" if samples else ""
            self._console.print(f"{name}{resumed}")
        self._current = branch

    def __enter__(self) -> Progression:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
