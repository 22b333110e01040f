"""Warnings: lines on standard error, after which the command continues."""

from __future__ import annotations

import functools
import sys

from maxbatch.system.folding import error_width, folded, printable


def warn(message: str) -> None:
    """Prints one line, folded on a terminal."""
    print(folded(f"maxbatch: warning: {printable(message)}", 0, error_width()), file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    """Prints a message unless this process has printed it."""
    warn(message)
