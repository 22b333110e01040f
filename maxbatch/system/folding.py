"""Lines for a terminal: folded to its width, between words, and printable. Imports no rich."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

_LEAST_WIDTH = 32  # of a column that is folded
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def terminal_width() -> int | None:
    """Returns the columns of the terminal that standard output goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def error_width() -> int | None:
    """Returns the columns of the terminal that standard error goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns a text with escapes for the control characters not in `keep`, which could move a terminal's cursor."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """Returns a number of things: "1 run", "2,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def folded(line: str, hanging: int, width: int | None) -> str:
    """Returns a line in as many as it takes, those after the first indented by `hanging` columns."""
    if width is None or len(line) <= width:
        return line
    indent = " " * hanging
    return textwrap.fill(
        line, max(width, hanging + 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def folded_parts(parts: Sequence[str], width: int | None) -> str:
    """Returns parts of a line, joined by " | ", in as many lines as they take; no part is cut in two."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width is None or len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def folded_rows(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Returns the lines of a table; its last column is folded between words, and the others are not folded.

    Where the last column would be too narrow, the wider ones of the others get less room, and a row whose cells need
    more has its last cell on lines of its own.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    while width is not None and sum(widths) + 2 * len(widths) > max(width - _LEAST_WIDTH, 0) and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    hanging = sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        head = "  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths, strict=False)) + "  "
        if width is None or len(head) + len(row[-1]) <= width:
            lines.append(f"{head}{row[-1]}".rstrip())
        elif len(head) == hanging:
            lines.append(head + folded(row[-1], 0, width - hanging).replace("\n", "\n" + " " * hanging))
        else:
            lines.append(f"{head.rstrip()}\n" + textwrap.indent(folded(row[-1], 0, width - hanging), " " * hanging))
    return lines


def folded_command(line: str, hanging: int, width: int | None) -> str:
    """Returns a command in as many lines as it takes; a shell reads them as one, since all but the last end in \\."""
    if width is None or len(line) <= width:
        return line
    start = re.match(r"\s*", line)
    lines = [start[0] if start else ""]
    for word in _WORD.findall(line):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(" " * hanging)
        lines[-1] += (" " if lines[-1].strip() else "") + word
    return "\n".join(lines)
