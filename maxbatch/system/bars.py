"""Bars that keep to one line of a terminal; none elsewhere. The consoles start faster without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from maxbatch.system.terminal import PlainConsole


class FittedText(ProgressColumn):
    """The description of a task; its last parts (between " | ") are dropped if the line is too long."""

    def __init__(self, console: Console, others: int) -> None:
        super().__init__()
        self._console, self._others = console, others  # columns of the terminal that the others take

    def render(self, task: Task) -> Text:
        """Returns as much of the description as fits."""
        room = self._console.width - self._others
        parts = task.description.split(" | ")
        while len(parts) > 1 and len(" | ".join(parts)) > room:
            parts.pop()
        return Text(" | ".join(parts)[: max(room, 8)], no_wrap=True)


def progress_bar(console: Console, disable: bool = False) -> Progress:
    """Returns a bar with its description and the time that is left, on one line of any terminal."""
    bar = 16 if console.width >= 100 else 8
    columns = (
        BarColumn(bar_width=bar),
        FittedText(console, others=bar + len(" 0:00:00 left") + 2),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console, disable=disable)


class LinesAboveBar:
    """A bar for many runs, all together, and the lines above it; elsewhere than on a terminal the lines alone."""

    def __init__(self, console: Console) -> None:
        self._lines = console
        self._bar = progress_bar(PlainConsole(), disable=not console.is_terminal)

    def say(self, line: str) -> None:
        """Prints a line, above the bar."""
        (self._lines if self._bar.disable else self._bar.console).print(line)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


@contextlib.contextmanager
def bytes_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes done; on a terminal a bar on standard error shows them."""
    console = PlainConsole(stderr=True)
    columns = (TextColumn(what), BarColumn(16), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
