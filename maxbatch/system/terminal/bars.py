"""Progress bars on one line of a terminal. A module of its own, so that consoles without them start
faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.segment import ControlType
from rich.text import Text

from maxbatch.system.terminal.terminal import PlainConsole

LINE_S = 30.0  # between two lines about a task without a terminal


class Pace:
    """The remaining time of a task by its pace so far, and the schedule of lines about it."""

    def __init__(self, total: float, done: float) -> None:
        self._total, self._first_done = total, done
        self._started = self._line_at = time.monotonic()

    def left(self, done: float) -> str:
        """Returns the time left as text; "" before the first progress."""
        elapsed, progress = time.monotonic() - self._started, done - self._first_done
        if progress <= 0:
            return ""
        return f"{timedelta(seconds=round(elapsed / progress * max(self._total - done, 0)))} left"

    def line_is_due(self) -> bool:
        """Returns whether `LINE_S` seconds have passed since the last line was due, and starts the
        next interval.
        """
        is_due = time.monotonic() - self._line_at >= LINE_S
        if is_due:
            self.line_was_printed()
        return is_due

    def line_was_printed(self) -> None:
        """Restarts the interval after a line."""
        self._line_at = time.monotonic()


class PaceColumn(ProgressColumn):
    """The remaining time of a task; rich's own column fails for steps longer than half a minute."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        return Text(self._pace.left(task.completed), no_wrap=True)


class FittedText(ProgressColumn):
    """The description of a task; its last parts (between " | ") are dropped if the line is too
    long.
    """

    def __init__(self, console: Console, others: int) -> None:
        super().__init__()
        self._console, self._others = console, others  # terminal columns of the other parts

    def render(self, task: Task) -> Text:
        """Returns as much of the description as fits."""
        room = self._console.width - self._others
        parts = task.description.split(" | ")
        while len(parts) > 1 and len(" | ".join(parts)) > room:
            parts.pop()
        return Text(" | ".join(parts)[: max(room, 8)], no_wrap=True)


class AtLineStart:
    """A renderable of one line, after which the cursor returns to the start of the line."""

    def __init__(self, line: RenderableType) -> None:
        self._line = line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (
            segment for segment in console.render(self._line, options) if segment.text != "\n"
        )
        yield Control((ControlType.CARRIAGE_RETURN,)).segment


class Bar(Progress):
    """A bar on one line.

    While `is_waiting` the bar is short, and other programs' text overwrites it instead of following
    it.
    """

    is_waiting = False

    def get_renderable(self) -> RenderableType:
        return (
            AtLineStart(super().get_renderable()) if self.is_waiting else super().get_renderable()
        )


def progress_bar(console: Console, pace: Pace, disable: bool = False) -> Bar:
    """Returns a bar with description and time left, on one line of any terminal."""
    bar = 16 if console.width >= 100 else 8
    text = FittedText(console, others=bar + len(" 00:00:00 left") + 2)
    columns = BarColumn(bar_width=bar), text, PaceColumn(pace)
    return Bar(*columns, console=console, disable=disable, transient=True)


class LinesAboveBar:
    """One bar for many runs, with lines above it; without a terminal, only the lines."""

    def __init__(self, console: Console, total: int, done: int, description: str = "") -> None:
        self._lines, self._pace = console, Pace(total, done)
        self._bar = progress_bar(
            PlainConsole(stderr=console.stderr), self._pace, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(description, total=total, completed=done)

    def say(self, line: str) -> None:
        (self._lines if self._bar.disable else self._bar.console).print(line)
        self._pace.line_was_printed()

    def show(self, done: int, description: str) -> None:
        """Shows progress on the bar; without a terminal, by a line every half minute."""
        self._bar.update(self._task, completed=done, description=description)
        if self._bar.disable and self._pace.line_is_due():
            self.say(" | ".join(filter(None, (description, self._pace.left(done)))))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


@contextlib.contextmanager
def bytes_bar(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes done; a bar or lines on standard error show them."""
    so_far = 0
    with LinesAboveBar(PlainConsole(stderr=True), total, so_far, label) as bar:

        def advance(num_bytes: int) -> None:
            nonlocal so_far
            so_far += num_bytes
            bar.show(so_far, f"{label}: {so_far / 1e6:,.1f} of {total / 1e6:,.1f} MB")

        yield advance
