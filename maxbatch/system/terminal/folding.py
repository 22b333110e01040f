"""Printable lines, folded to a terminal's width between words, without rich."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

_LEAST_WIDTH = 32  # width of a folded column
_JOINT = "\0"  # stands for a blank that no line breaks at
_UNIT = re.compile(r"(?<=\d) (?=[a-z]+\b)")  # between a number and its unit
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def terminal_width() -> int | None:
    """Returns the width of standard output's terminal, or None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def help_width() -> int | None:
    """Returns the width that COLUMNS states, else that of standard output's terminal, or None."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else terminal_width()


def error_width() -> int | None:
    """Returns the width of standard error's terminal, or None."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def printable(text: str, keep: str = "\n\t") -> str:
    """Escapes control characters not in `keep`, which could move a terminal's cursor."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def counted(number: int, noun: str) -> str:
    """Formats a count: "1 run", "2,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def folded(line: str, hanging: int, width: int | None) -> str:
    """Folds a line, a number with its unit; the lines after the first are indented by `hanging`
    columns.
    """
    if width is None or len(line) <= width:
        return line
    indent = " " * hanging
    joined = _UNIT.sub(_JOINT, line)
    return textwrap.fill(
        joined,
        max(width, hanging + 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(_JOINT, " ")


def folded_parts(parts: Sequence[str], width: int | None) -> str:
    """Joins parts by " | ", folded between parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width is None or len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def folded_rows(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Returns the lines of a table; only its last column is folded, between words.

    If the last column would be too narrow, the widest other columns get less room, and a row that
    needs more has its last cell on separate lines.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    while (
        width is not None
        and sum(widths) + 2 * len(widths) > max(width - _LEAST_WIDTH, 0)
        and max(widths) > 1
    ):
        widths[widths.index(max(widths))] -= 1
    hanging = sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        head = "  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths, strict=False)) + "  "
        if width is None or len(head) + len(row[-1]) <= width:
            lines.append(f"{head}{row[-1]}".rstrip())
        elif len(head) == hanging:
            lines.append(
                head + folded(row[-1], 0, width - hanging).replace("\n", "\n" + " " * hanging)
            )
        else:
            lines.append(
                f"{head.rstrip()}\n"
                + textwrap.indent(folded(row[-1], 0, width - hanging), " " * hanging)
            )
    return lines


def folded_command(line: str, hanging: int, width: int | None) -> str:
    """Folds a command; lines end in \\, so that a shell reads one command."""
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
