"""Consoles and tables that fit the width of a terminal, and output that may be piped.

Output to a pipe or a file is never folded.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from maxbatch.system.terminal.folding import printable

PIPE_WIDTH = 400  # wider than any table here, so that nothing is cut off


class PlainConsole(Console):
    """A console of plain text, with the terminal's width or practically none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **settings})
        if not self.is_terminal and "width" not in settings:
            self.width = PIPE_WIDTH

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yields the printed segments, with control characters of foreign text escaped."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else Segment(printable(segment.text), segment.style)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Returns a text at its printed width, so that columns of a table stay aligned."""
        return super().render_str(printable(text), **settings)


class PipeConsole(PlainConsole):
    """A console that raises BrokenPipeError where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raises for the command line, which does not treat a closed pipe as a failure."""
        raise BrokenPipeError


class TrainingConsole(PlainConsole):
    """A console that goes quiet when its reader or its terminal disappears."""

    def print(self, *objects: Any, **settings: Any) -> None:
        try:
            super().print(*objects, **settings)
        except OSError as error:
            if error.errno != errno.EIO:  # of a terminal that is closed
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


def discard_output() -> None:
    """Discards standard output, so that the interpreter does not flush into a closed pipe at
    exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class PlainTable(Table):
    """A borderless table that truncates no cell.

    Columns that do not fit follow in further tables; each repeats the first column and leaves out
    rows without other cells. Only a cell wider than the terminal is folded, between words.
    """

    def __init__(self, *heads: str, justify: JustifyMethod = "left") -> None:
        super().__init__(box=None, header_style="bold underline", padding=(0, 2, 0, 0))
        for head in heads:
            self.add_column(head, justify=justify, no_wrap=True)

    def add_row(self, *cells: RenderableType | None, **settings: Any) -> None:
        """Adds a row; any text stays inside its cell."""
        super().add_row(
            *(printable(cell, keep="") if isinstance(cell, str) else cell for cell in cells),
            **settings,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        everywhere, wide = range(self.row_count), options.update(max_width=10_000)
        widths = [
            Measurement.get(console, wide, self._part([i], everywhere)).maximum
            for i in range(len(self.columns))
        ]
        if sum(widths) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        cells = [list(column.cells) for column in self.columns]
        for number, part in enumerate(_parts(widths, options.max_width)):
            own_columns = part[1:] if number else part
            table = self._part(
                part, [row for row in everywhere if any(str(cells[i][row]) for i in own_columns)]
            )
            table.columns[-1].no_wrap = sum(widths[i] for i in part) <= options.max_width
            if number:
                yield Text()
            yield from table.__rich_console__(console, options)

    def _part(self, places: Sequence[int], rows: Iterable[int]) -> Table:
        """Returns a table of some columns and rows, without folding."""
        columns, cells = (
            [self.columns[i].copy() for i in places],
            [list(self.columns[i].cells) for i in places],
        )
        for column in columns:
            column.no_wrap = True
        table = Table(*columns, box=None, header_style=self.header_style, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*(column[row] for column in cells), style=self.rows[row].style)
        return table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _parts(widths: list[int], width: int) -> list[list[int]]:
    """Returns the columns of each table: as many as fit, always with the first."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[i] for i in parts[-1]) + widths[column] > width:
            parts.append([0])
        parts[-1].append(column)
    return parts
