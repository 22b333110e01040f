"""The time for which a command retries requests of stores.

Requests are made on threads of many libraries, to which no context variable travels. So there is one `Patience` at a
time, of the command that runs: the outermost `Stopping` makes it (`begin`), and passes on a request to stop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

_SLICE_S = 0.5


class Patience:
    """How long a request that fails for a passing reason is tried again, in one command."""

    current: ClassVar[Patience]  # of the command that runs
    seconds = 300.0
    hurried_seconds = 20.0  # after a request to stop, for all requests together
    last_seconds = 2.0  # after that, for each

    def __init__(self, before: Patience | None = None) -> None:
        self._before = before if before and before.keeps_threads else None  # of a command that left threads behind
        self._hurried_at: float | None = None
        self.gave_up = False  # after a request to stop
        self._left_behind = False
        self._trying = 0  # threads that make a request
        self._lock = threading.Lock()

    def hurry(self) -> None:
        """Shortens the bound after a request to stop the command."""
        self._hurried_at = self._hurried_at or time.monotonic()

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Counts a thread that makes a request, which may be tried again for long."""
        with self._lock:
            self._trying += 1
        try:
            yield
        finally:
            with self._lock:
                self._trying -= 1

    @property
    def keeps_threads(self) -> bool:
        """Whether threads of this process still wait for a store."""
        return self._left_behind or self._trying > 0 or (self._before is not None and self._before.keeps_threads)

    def leave_behind(self) -> None:
        """Notes that the command gave up on a store for which a thread still waits."""
        self._left_behind = True
        self.give_up()

    def ends(self, started: float) -> float:
        """Returns when a request that started then is given up, in time.monotonic()."""
        end = started + self.seconds
        if self._hurried_at is None:
            return end
        return min(end, max(started + self.last_seconds, self._hurried_at + self.hurried_seconds))

    def is_over(self, started: float) -> bool:
        """Returns whether somebody asked to stop, and a request that started then is to be given up."""
        return self._hurried_at is not None and time.monotonic() >= self.ends(started)

    def give_up(self) -> None:
        """Records that a request was given up; after a request to stop, later ones get less time."""
        self.gave_up = self._hurried_at is not None

    def sleep(self, seconds: float) -> None:
        """Pauses between two tries; a request to stop ends the pause."""
        end, was_hurried = time.monotonic() + seconds, self._hurried_at
        while (left := end - time.monotonic()) > 0 and self._hurried_at == was_hurried:
            time.sleep(min(left, _SLICE_S))


Patience.current = Patience()


def patience() -> Patience:
    """Returns the patience of the command that runs."""
    return Patience.current


def begin() -> Patience:
    """Returns the patience of a command that begins, without a request to stop."""
    Patience.current = Patience(Patience.current)
    return Patience.current
