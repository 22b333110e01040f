"""How far a sweep is: a line for each trial that starts or ends, and a bar on a terminal."""

from __future__ import annotations

from rich.console import Console

from maxbatch.system.bars import LinesAboveBar


class SweepProgress(LinesAboveBar):
    """The trials that ended, of those that the sweep has; a context manager."""

    def __init__(self, console: Console, num_ended: int, num_trials: int) -> None:
        super().__init__(console)
        self._num_ended, self._num_trials = num_ended, num_trials
        self._task = self._bar.add_task(self._counted, total=num_trials, completed=num_ended)

    @property
    def _counted(self) -> str:
        return f"{self._num_ended} of {self._num_trials} trials ended"

    def ended(self) -> str:
        """Counts a trial that ended, and returns how many did."""
        self._num_ended += 1
        self._bar.update(self._task, completed=self._num_ended, description=self._counted)
        return self._counted
