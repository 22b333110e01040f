"""The moment at which a command began, so that the first run of a command counts the time of its imports."""

from __future__ import annotations

import time

_STARTED: list[float] = []  # the time of day at which the command began, until a run takes it


def mark_start() -> None:
    """Notes that a command begins now."""
    _STARTED[:] = [time.time()]


def take_start() -> float:
    """Returns the time of day at which the command began; now, if there is none or another run took it already."""
    return _STARTED.pop() if _STARTED else time.time()
