"""One process that scores responses, as its parent sees it: started, asked, waited for, killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from maxbatch.rl.reward_worker import Answer, Messages, Request, packed

# Importing the user's modules may take long; one that never ends must not stop training.
_START_LIMIT_S = 300.0
# How often a silent process is asked whether it still lives: something it started may hold its pipe open.
_POLL_S = 0.5
_READ_BYTES = 1 << 16


class Ended(Exception):
    """The process is no more; what happened, in one line."""


class TimedOut(Ended):
    """It was killed, since it took too long."""


class Refused(Ended):
    """It could not import a function."""


class RewardProcess:
    """A process with the functions of `specs`. Used by one thread, which outlives it; `close` by any.

    On Linux the process is killed when the thread that started it ends, and so with the command, however that ends.
    """

    def __init__(self, specs: Sequence[str], timeout_s: float):
        """Takes the functions and how long a response may take; starts nothing."""
        self._specs = list(specs)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process where none lives, and waits until it has imported its functions.

        Raises:
          Refused: it cannot.
          Ended: it died over that, took too long, or has been closed for good.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        with self._lock:
            if self._closed:
                raise Ended("closed")
            self._spawn()
        self._send(self._specs, _START_LIMIT_S)
        problem = self._receive(_START_LIMIT_S)
        if problem:
            self._kill()
            raise Refused(problem)

    def answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yields the answer to each request as soon as it is there, in order.

        Raises:
          TimedOut: the next answer took longer than the limit.
          Ended: the process died over it.
        """
        self._send(requests, self._timeout_s)
        for _ in requests:
            yield self._receive(self._timeout_s)

    def close(self) -> None:
        """Ends the process for good, in whatever it is doing."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Ends the process and waits until it is gone; `start` may follow."""
        self._kill()

    def _spawn(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._requests, False)
        self._messages = Messages()
        self._received: deque[Any] = deque()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "maxbatch.rl.reward_worker", str(requests), str(answers)],
                stdin=subprocess.PIPE, stdout=2, pass_fds=(requests, answers),
            )  # fmt: skip
        except OSError as error:
            os.close(self._requests)
            os.close(self._answers)
            raise Ended(f"cannot start a process ({error})") from error
        finally:
            os.close(requests)
            os.close(answers)
        self._process = process

    def _kill(self) -> int | None:
        """Ends the process, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        os.close(self._requests)
        os.close(self._answers)
        assert process.stdin is not None
        process.stdin.close()
        return process.wait()

    def _send(self, message: Any, limit_s: float) -> None:
        rest = memoryview(packed(message))
        end = time.monotonic() + limit_s
        while rest:
            if not _ready(self._requests, select.POLLOUT, end - time.monotonic()):
                raise self._late(limit_s)
            try:
                rest = rest[os.write(self._requests, rest) :]
            except BrokenPipeError:
                raise self._death() from None

    def _receive(self, limit_s: float) -> Any:
        end = time.monotonic() + limit_s
        while not self._received:
            left = end - time.monotonic()
            if _ready(self._answers, select.POLLIN, min(left, _POLL_S)):
                more = os.read(self._answers, _READ_BYTES)
                if not more:
                    raise self._death()
                self._received.extend(self._messages.feed(more))
            elif left <= 0:
                raise self._late(limit_s)
            elif self._has_ended() and not _ready(self._answers, select.POLLIN, 0):
                raise self._death()
        return self._received.popleft()

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _late(self, limit_s: float) -> TimedOut:
        self._kill()
        return TimedOut(f"took more than {limit_s:g} s")

    def _death(self) -> Ended:
        process = self._process
        # The pipe closes a moment before the process has ended.
        code = process.wait() if process is not None and not _lives_on(process) else None
        self._kill()
        if code is None:
            return Ended("the process closed its pipes")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Ended(f"the process ended with {how}")


def _lives_on(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    """Whether a pipe can be read or written within so many seconds, or has no other end any more."""
    waiting = select.poll()
    waiting.register(descriptor, event)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
