"""Periodic calls of a function on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from maxbatch.system.errors import ConfigError, TrainingError


class Repeating:
    """A thread that calls a function every `period_s` seconds until stopped, or until the function
    fails.

    Args:
      period_s: seconds from the end of one call to the next.
    """

    def __init__(self, call: Callable[[], None], period_s: float, name: str) -> None:
        self._call, self._period_s = call, period_s
        self._failure: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether a call has failed; it was the last one."""
        return self._failure is not None

    def check(self) -> None:
        """Re-raises the failure of the last call on the caller's thread."""
        if self._failure is not None:
            raise self._failure

    def stop(self, wait_s: float = 0.0) -> bool:
        """Stops further calls; returns whether the current one ended within `wait_s`."""
        self._stopped.set()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self._call()
            except (ConfigError, TrainingError, OSError) as error:
                self._failure = error
                return
