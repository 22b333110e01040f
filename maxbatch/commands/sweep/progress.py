"""How far a sweep is: a line for each trial that starts or ends, and a bar on a terminal."""

from __future__ import annotations

from rich.console import Console

from maxbatch.system.bars import progress_bar
from maxbatch.system.terminal import PlainConsole


class SweepProgress:
    """The trials that ended, of those that the sweep has; a context manager."""

    def __init__(self, console: Console, num_ended: int, num_trials: int) -> None:
        self._console, self._num_ended, self._num_trials = console, num_ended, num_trials
        self._bar = progress_bar(PlainConsole(), disable=not console.is_terminal)
        self._task = self._bar.add_task(self._counted, total=num_trials, completed=num_ended)

    @property
    def _counted(self) -> str:
        return f"{self._num_ended} of {self._num_trials} trials ended"

    def ended(self) -> str:
        """Counts a trial that ended, and returns how many did."""
        self._num_ended += 1
        self._bar.update(self._task, completed=self._num_ended, description=self._counted)
        return self._counted

    def say(self, line: str) -> None:
        """Prints a line, above the bar."""
        (self._console if self._bar.disable else self._bar.console).print(line)

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
