"""Stopping a run by a signal: the loop stops after the current update."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxbatch.system.processes.command_start import owns_process
from maxbatch.system.processes.stopping import Stopping, end_unsaved

_RECORD_S = 5.0  # to record the end of a run that a signal ends at once
_CALLS = count(1)  # counts the calls of `before_update` in this process, over all runs


class StopRequest(Stopping):
    """A request to stop the run; a second SIGINT stops it at once.

    With several hosts, JAX's preemption service listens for SIGTERM (a Python handler would silence
    it) and lets them agree on the update; the other signals are forwarded to it.

    A context manager; off the main thread, where Python delivers no signals, it stays unset.
    """

    def __init__(self) -> None:
        super().__init__("after this update")
        self._several_hosts = jax.process_count() > 1
        if threading.current_thread() is not threading.main_thread():
            self.numbers = ()
        elif self._several_hosts:
            self.numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        super()._on_signal(number, frame)
        if self._several_hosts:
            os.kill(os.getpid(), signal.SIGTERM)

    def end_unless_saving(self, record: Callable[[str], None]) -> None:
        """Has a signal end the process from now on, until `must_save`; `record` is called with its
        name before.

        Several hosts have to agree, and a process of the user's own is not ours to end.
        """
        if self.numbers and not self._several_hosts and owns_process():

            def end(name: str) -> None:
                recorder = threading.Thread(target=record, args=(name,), daemon=True)
                recorder.start()
                # no longer: a store may not answer
                recorder.join(_RECORD_S)
                end_unsaved(name)

            self.end_at_once = end

    def must_save(self) -> None:
        """Has a signal stop the run after the current update: there is something to save from now
        on.
        """
        self.end_at_once = None

    def before_update(self) -> bool:
        """Returns whether to stop before the next update; all hosts call it and get the same
        result.
        """
        if not self._several_hosts:
            return self.is_asked
        # The hosts agree on the call after the latest one made by any of them.
        if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
            self.signal_name = self.signal_name or "SIGTERM"
            return True
        return False
