"""The start of a command: its time, so that its first run counts the time of imports, and whose process it is."""

from __future__ import annotations

import time

_STARTED: list[float] = []  # time of day when the command began, until a run takes it
_is_own_process = False


def mark_start() -> None:
    _STARTED[:] = [time.time()]


def take_start() -> float:
    """Returns the time of day when the command began; the current time if another run took it already."""
    return _STARTED.pop() if _STARTED else time.time()


def take_process() -> None:
    """Records that this process runs a command and nothing else."""
    global _is_own_process
    _is_own_process = True


def owns_process() -> bool:
    """Returns whether this process runs a command and nothing else; False in a user's program and in the workers."""
    return _is_own_process
