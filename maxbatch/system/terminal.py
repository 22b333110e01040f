"""Consoles for output that may be piped into a reader who leaves early."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class PipeConsole(Console):
    """A console that raises BrokenPipeError where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line, for which a reader who has read enough is no failure."""
        raise BrokenPipeError


class TrainingConsole(Console):
    """Standard output that may go away: training goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


def discard_output() -> None:
    """Sends standard output nowhere: the interpreter must not flush into the closed pipe when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
