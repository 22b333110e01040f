"""Lines for a terminal: folded to its width, between words, and printable. Imports no rich."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def terminal_width() -> int | None:
    """Returns the columns of the terminal that standard output goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns a text with escapes for the control characters not in `keep`, which could move a terminal's cursor."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def folded(line: str, hanging: int, width: int | None) -> str:
    """Returns a line in as many as it takes, those after the first indented by `hanging` columns."""
    if width is None or len(line) <= width:
        return line
    indent = " " * hanging
    return textwrap.fill(
        line, max(width, hanging + 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
