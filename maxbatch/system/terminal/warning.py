"""Notes and warnings: lines on standard error, after which the command continues."""

from __future__ import annotations

import functools
import sys

from maxbatch.system.terminal.folding import error_width, folded, printable


def note(text: str, keep: str = "") -> None:
    """Prints one line apart from a command's output, folded on a terminal; escapes control
    characters not in `keep`.
    """
    print(
        folded(f"maxbatch: {printable(text, keep)}", 0, error_width()), file=sys.stderr, flush=True
    )


def warn(message: str) -> None:
    """Prints a warning; the message may quote an error of several lines."""
    note(f"warning: {message}", keep="\n\t")


@functools.cache
def warn_once(message: str) -> None:
    """Prints a message unless this process has printed it."""
    warn(message)
