"""Heartbeats of the hosts of a run, and the end of the others when one dies.

Every host writes beats to the store of JAX's coordination service, which the first host runs. The
first host watches the beats, and reports a silent host as failed. The others detect that the first
host is dead because its store no longer answers. JAX aborts the process at once when the connection
closes, so a handler of SIGABRT covers that case. (JAX accepts a Python callback instead, but cannot
pass it its argument, jax 0.10.)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from maxbatch.parallel.deaths import LastSaved, announce_end, death_of, silence_of
from maxbatch.parallel.jax_internals import coordination
from maxbatch.system.errors import EXIT_INPUT
from maxbatch.system.terminal.folding import printable

POLL_S = 0.5
# for which the first host keeps the store, so that the others read why the run ends
LEAVE_S = 6 * POLL_S
_FAILURE_KEY, _BEATS, _DONE = "maxbatch/failure", "maxbatch/beats/", "done"
_CONNECT_S = 2.0


def backstop_of(timeout_s: int) -> int:
    """Returns the timeout of JAX's own heartbeats, which abort without a message: behind ours."""
    return 2 * timeout_s + 30


def leave(code: int, is_first: bool) -> NoReturn:
    """Ends the process at once; the first host, which keeps the store, ends last."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if is_first:
        time.sleep(LEAVE_S)
    os._exit(code)


def _set_handler(handler: ctypes.c_void_p | None) -> None:
    """Sets the handler of SIGABRT, which any thread calls at once: Python's own would wait for the
    main thread.
    """
    set_signal = ctypes.CDLL(None).signal
    set_signal.argtypes, set_signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_signal(int(signal.SIGABRT), handler)


class Heartbeats:
    """The beats of this host, and its watch over the others.

    Args:
      store: the client of the coordination service.
      address: HOST:PORT of that service.
      last_saved: the newest saved step, for the message about a dead host.
    """

    def __init__(self, store: Any, address: str, timeout_s: int, last_saved: LastSaved) -> None:
        self._store, self._address, self._last_saved = store, address, last_saved
        state = coordination()  # known before any device has started
        self._index, self._num_hosts = int(state.process_id), int(state.num_processes)
        self._silence_s, self._period_s = silence_of(timeout_s), timeout_s / 10
        self._closed, self._reports = threading.Event(), False
        self._answered_at = self._looked_at = time.monotonic()
        # of each host, its last beat and when it was new here
        self._seen: dict[int, tuple[str, float]] = {}
        self._threads = [
            threading.Thread(target=target, name="maxbatch-hosts", daemon=True)
            for target in (self._talk, self._watch_store)
        ]
        # kept alive as long as it is installed
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)

    def start(self) -> None:
        if self._index:
            _set_handler(ctypes.cast(self._handler, ctypes.c_void_p))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops the beats: the host is done, and its silence is no failure."""
        self._closed.set()
        self._threads[0].join(self._period_s + LEAVE_S)
        if self._index:
            _set_handler(None)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._beat(_DONE)

    def wait_for_report(self) -> None:
        """Waits as long as finding a dead host may take; the report of one ends this process."""
        self._threads[0].join(self._silence_s + self._period_s + LEAVE_S)

    def own_report(self) -> None:
        """Records that this host reports its own failure, so that it does not print another host's
        as well.
        """
        self._reports = True

    def fail(self, message: str, code: int) -> None:
        """Reports to all hosts that this one failed."""
        failure = {"host": self._index, "message": message, "code": code}
        # another host failed first, or the first host ended
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.key_value_set(_FAILURE_KEY, json.dumps(failure))

    def _talk(self) -> None:
        """Sends beats, and ends this process when a host has failed."""
        beats, due = 0, 0.0
        while not self._closed.wait(POLL_S):
            try:
                if time.monotonic() >= due:
                    beats, due = beats + 1, time.monotonic() + self._period_s
                    self._beat(str(beats))
                    if not self._index:
                        self._look_for_silent()
                failure = self._failure()
            except jax.errors.JaxRuntimeError:
                continue  # the store does not answer: `_watch_store` counts
            self._answered_at = time.monotonic()
            if (
                failure
                and not self._reports
                and (failure["host"] != self._index or failure.get("is_dead"))
            ):
                prefix = "" if failure.get("is_dead") else f"host {failure['host']}: "
                if prefix:
                    announce_end(f"host {failure['host']} failed", failure["code"] == EXIT_INPUT)
                self._end(f"{prefix}{failure['message']}", failure["code"])
            if failure:
                return

    def _failure(self) -> dict[str, Any] | None:
        try:
            failure: dict[str, Any] = json.loads(self._store.key_value_try_get(_FAILURE_KEY))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return failure

    def _beat(self, text: str) -> None:
        self._store.key_value_set(f"{_BEATS}{self._index}", text, allow_overwrite=True)

    def _look_for_silent(self) -> None:
        """Reports the first host that has been silent for too long."""
        now = time.monotonic()
        # this process was stopped, and perhaps the others with it
        if now - self._looked_at > self._silence_s / 2:
            self._seen.clear()
        self._looked_at = now
        beats = {
            int(key.rpartition("/")[2]): text for key, text in self._store.key_value_dir_get(_BEATS)
        }
        for host in range(1, self._num_hosts):
            text = beats.get(host, "")
            if text == _DONE:
                continue
            before, since = self._seen.setdefault(host, (text, now))
            if text != before:
                self._seen[host] = (text, now)
            elif now - since >= self._silence_s:
                how = f"has died: no heartbeat for {now - since:.0f} s (heartbeat_timeout_s)"
                message, code = death_of(host, self._num_hosts, how, self._last_saved)
                failure = {"host": host, "message": message, "code": code, "is_dead": True}
                self._store.key_value_set(_FAILURE_KEY, json.dumps(failure))
                return

    def _watch_store(self) -> None:
        """Ends this process when the first host no longer answers."""
        while self._index and not self._closed.wait(POLL_S):
            now = time.monotonic()
            # this process was stopped, and perhaps the first host too
            if now - self._looked_at > self._silence_s / 2:
                self._answered_at = now
            self._looked_at = now
            silent_s = now - self._answered_at
            if silent_s >= self._silence_s:
                how = f"has died: it has not answered for {silent_s:.0f} s (heartbeat_timeout_s)"
                self._end(*death_of(0, self._num_hosts, how, self._last_saved))

    def _on_abort(self, number: int) -> None:
        """Ends this process where JAX aborts it because the first host has closed its
        connections.
        """
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except OSError:
            how = "has died: it has closed its connections"
            self._end(*death_of(0, self._num_hosts, how, self._last_saved))

    def _end(self, message: str, code: int) -> NoReturn:
        print(f"maxbatch: error: {printable(message)}", file=sys.stderr)
        leave(code, is_first=not self._index)
