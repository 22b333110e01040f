"""Consoles for output that may be piped into a reader who leaves early."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class PipeConsole(Console):
    """A console that raises BrokenPipeError where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raises for the command line, which takes a reader who has read enough for no failure."""
        raise BrokenPipeError


class TrainingConsole(Console):
    """A console without which training goes on when its reader leaves."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


def discard_output() -> None:
    """Sends standard output nowhere, so that the interpreter does not flush into a closed pipe when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
