"""The time for which a command retries requests of stores.

Libraries make requests on their own threads, which do not inherit context variables. So there is
one `Patience` at a time, for the running command: the outermost `Stopping` makes it (`begin`) and
forwards requests to stop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

_SLICE_S = 0.5


class Patience:
    """The time for retries of temporarily failing requests, in one command."""

    current: ClassVar[Patience]  # of the running command
    seconds = 300.0
    hurried_seconds = 20.0  # after a request to stop, for all requests together
    last_seconds = 2.0  # after that, for each

    def __init__(self, before: Patience | None = None) -> None:
        # a command that left threads behind
        self._before = before if before and before.keeps_threads else None
        self._hurried_at: float | None = None
        self.gave_up = False  # after a request to stop
        self._left_behind = False
        self._trying = 0  # threads in a request
        self._lock = threading.Lock()

    def hurry(self) -> None:
        """Shortens the bound after a request to stop the command."""
        self._hurried_at = self._hurried_at or time.monotonic()

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Counts a thread in a request, which may be retried for long."""
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
        return (
            self._left_behind
            or self._trying > 0
            or (self._before is not None and self._before.keeps_threads)
        )

    def leave_behind(self) -> None:
        """Records that the command gave up on a store while a thread still waits for it."""
        self._left_behind = True
        self.give_up()

    def ends(self, started: float) -> float:
        """Returns the deadline of a request started at `started`, in time.monotonic()."""
        end = started + self.seconds
        if self._hurried_at is None:
            return end
        return min(end, max(started + self.last_seconds, self._hurried_at + self.hurried_seconds))

    def is_over(self, started: float) -> bool:
        """Returns whether a stop was requested and the request started at `started` is past its
        deadline.
        """
        return self._hurried_at is not None and time.monotonic() >= self.ends(started)

    def give_up(self) -> None:
        """Records an abandoned request; after a request to stop, later ones get less time."""
        self.gave_up = self._hurried_at is not None

    def sleep(self, seconds: float) -> None:
        """Pauses between two tries; a request to stop ends the pause."""
        end, was_hurried = time.monotonic() + seconds, self._hurried_at
        while (left := end - time.monotonic()) > 0 and self._hurried_at == was_hurried:
            time.sleep(min(left, _SLICE_S))


Patience.current = Patience()


def patience() -> Patience:
    """Returns the running command's patience."""
    return Patience.current


def begin() -> Patience:
    """Starts the patience of a new command."""
    Patience.current = Patience(Patience.current)
    return Patience.current
