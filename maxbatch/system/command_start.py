"""The start time of a command, so that its first run counts the time of imports."""

from __future__ import annotations

import time

_STARTED: list[float] = []  # time of day when the command began, until a run takes it


def mark_start() -> None:
    """Records the start of a command."""
    _STARTED[:] = [time.time()]


def take_start() -> float:
    """Returns the time of day when the command began; the current time if another run took it already."""
    return _STARTED.pop() if _STARTED else time.time()
