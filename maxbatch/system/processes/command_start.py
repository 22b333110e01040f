"""The start of a command: its time, so that its first run counts the time of imports, its words,
and whose process it is.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

_STARTED: list[float] = []  # time of day when the command began, until a run takes it
_ARGUMENTS: list[str] = []  # of the command
# Commands that the same command continues: a signal that asks them to stop, however early, ends
# them with exit code 75.
_CONTINUED = ("train", "rl", "sweep", "critical-batch")
_is_own_process = False


def mark_start(arguments: Sequence[str]) -> None:
    _STARTED[:] = [time.time()]
    _ARGUMENTS[:] = arguments


def command_text() -> str:
    """Returns the command as a shell takes it; of a user's program, its own."""
    return shlex.join(["maxbatch", *_ARGUMENTS] if _ARGUMENTS else sys.argv)


def can_continue(arguments: Sequence[str]) -> bool:
    """Returns whether a command that is asked to stop goes on when it is typed again."""
    return bool(arguments) and arguments[0] in _CONTINUED


def take_start() -> float:
    """Returns the time of day when the command began; the current time if another run took it
    already.
    """
    return _STARTED.pop() if _STARTED else time.time()


def take_process() -> None:
    """Records that this process runs a command and nothing else."""
    global _is_own_process
    _is_own_process = True


def owns_process() -> bool:
    """Returns whether this process runs a command and nothing else; False in a user's program and
    in the workers.
    """
    return _is_own_process
