"""A pool of worker processes; a call that crashes its worker or takes too long fails alone.

A worker is a separate interpreter, `python -m maxbatch.system.processes.worker_pool`. It does not
import the caller's main module, leaves Ctrl-C and SIGTERM to its parent, ends with it, and prints
to standard error. Items have numbers, and an answer needs its item's number; processes forked by
the function do not answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Generic, ParamSpec, Self, TypeVar

from maxbatch.system.processes.child_process import (
    end_with_parent,
    holding_interrupts,
    is_stopped,
    leave_signals_to_parent,
)

# For imports, which may take long but not forever.
_SETUP_LIMIT_S = 300.0
# Interval of checks on a silent worker, whose own child may hold the connection open.
_POLL_S = 0.5
# Time for a worker to end after it closed its connection; writing a core dump takes a while.
_END_S = 30.0
_SETUP = 0  # number of the response after set-up
_MOST_ANSWER_BYTES = 1 << 30


class WorkerEnded(Exception):
    """The worker ended during the call; the message is one line."""


class Killed(WorkerEnded):
    """The worker was killed or stopped from outside: by a person, or by the system when out of
    memory.
    """


class TimedOut(WorkerEnded):
    """The call took longer than the limit, and the worker was killed."""


Item = TypeVar("Item")
Answer = TypeVar("Answer")
P = ParamSpec("P")
_Part = deque[tuple[Future[Answer], Item]]  # items, and the futures of their results


class WorkerPool(Generic[Item, Answer]):
    """Worker processes that call one function, each served by a thread; a context manager."""

    def __init__(
        self,
        setup: Callable[[], Callable[[Item], Answer]],
        workers: int,
        *,
        limit_s: float = math.inf,
        memory_bytes: int | None = None,
        attempts: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers without waiting for them.

        Args:
          setup: called once in each worker, including replacements; returns the function for items.
            It is pickled, and so are items and answers.
          limit_s: limit of a call, in seconds.
          memory_bytes: bound on the private memory of each worker and its children, on Linux; an
            allocation beyond it raises MemoryError in the function.
          attempts: tries of an item whose worker is killed (`Killed`), each in a new worker.
          variables: the workers' environment variables, beside the caller's.
        """
        self._parts: queue.SimpleQueue[_Part[Answer, Item] | None] = queue.SimpleQueue()
        self._is_closed, self._attempts = False, attempts
        pickled, environment = pickle.dumps(setup), {**os.environ, **(variables or {})}
        start = functools.partial(_spawn, environment, memory_bytes or 0)
        self._workers = [_Worker(pickled, limit_s, start) for _ in range(workers)]
        self._started: list[Future[None]] = [Future() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name="maxbatch-worker", daemon=True)
            for pair in zip(self._workers, self._started, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_setup(self) -> None:
        """Waits until every worker is set up; raises WorkerEnded if one ended, or the exception of
        `setup`.
        """
        for started in self._started:
            started.result()

    def submit(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Returns futures of the function's results for each item; batches are served in order.

        A future raises the error of the function or of a new worker's setup, WorkerEnded if the
        worker ended during the call, TimedOut, or CancelledError after the pool is closed.
        """
        if self._is_closed:
            raise RuntimeError("the worker pool is closed")
        futures: list[Future[Answer]] = [Future() for _ in items]
        left = deque(zip(futures, items, strict=True))
        while left:
            # Large parts first, single items last, so that workers finish together (guided
            # self-scheduling: Polychronopoulos and Kuck 1987).
            size = -(-len(left) // (2 * len(self._workers)))
            self._parts.put(deque(left.popleft() for _ in range(size)))
        return futures

    def close(self) -> None:
        """Kills the workers and cancels their calls."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill_for_good()
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, worker: _Worker, started: Future[None]) -> None:
        try:
            worker.start()
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
        while (part := self._parts.get()) is not None:
            self._call(worker, part)
            # Replace an ended worker now, while no item waits for it.
            with contextlib.suppress(Exception):
                worker.start()
        worker.end()

    def _call(self, worker: _Worker, part: _Part[Answer, Item]) -> None:
        killed = 0  # times during the first item

        def final(error: Exception) -> Exception | None:
            """Returns the error of the first item, or None to try again."""
            nonlocal killed
            killed += isinstance(error, Killed)
            if not isinstance(error, Killed) or self._attempts == 1:
                return error
            return None if killed < self._attempts else Killed(f"{error}, {killed} times")

        while part and not self._is_closed:
            try:
                worker.start()
            except Exception as error:
                if (failure := final(error)) is None:
                    continue
                for future, _ in part:
                    future.set_exception(failure)
                return
            try:
                for value, raised in worker.answers([item for _, item in part]):
                    future, _ = part.popleft()
                    killed = 0
                    future.set_result(value) if raised is None else future.set_exception(raised)
            # the worker ended, or an item or its answer cannot be pickled
            except Exception as error:
                worker.end()
                if (failure := final(error)) is not None and not self._is_closed:
                    part.popleft()[0].set_exception(failure)
                    killed = 0
        for future, _ in part:
            future.cancel()


class _Worker:
    """One worker process, used by one thread."""

    def __init__(
        self, setup: bytes, limit_s: float, spawn: Callable[[int], subprocess.Popen[bytes]]
    ) -> None:
        self._setup, self._limit_s, self._spawn = setup, limit_s, spawn
        self._next = 0  # number of the next item
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Starts the process unless it is alive, waits for its set-up, and re-raises the exception
        of `setup`.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        with self._lock:
            if self._is_closed:
                raise WorkerEnded("the worker pool is closed")
            self._connection, child_end = multiprocessing.Pipe()
            with child_end:
                self._process = self._spawn(child_end.fileno())
        with self._telling_the_end():
            self._connection.send_bytes(self._setup)
        self._next = _SETUP + 1
        _, error = self._receive(_SETUP, _SETUP_LIMIT_S)
        if error is not None:
            self.end()
            raise error

    def answers(self, items: Sequence[object]) -> Iterator[tuple[Any, Exception | None]]:
        """Yields the result or the exception of each item; raises WorkerEnded if the process ended
        during the next.
        """
        assert self._connection is not None
        numbered = list(enumerate(items, self._next))
        with self._telling_the_end():
            self._connection.send(numbered)
        for number, _ in numbered:
            self._next = number + 1
            yield self._receive(number, self._limit_s)

    def kill_for_good(self) -> None:
        """Kills the process, from any thread, and prevents a restart."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """Kills the process if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            assert self._connection is not None
            self._connection.close()
            process.communicate()

    def _receive(self, number: int, limit_s: float) -> tuple[object, Exception | None]:
        """Returns the result with this number, and drops others."""
        end, answered = time.monotonic() + limit_s, None
        with self._telling_the_end():
            while answered != number:
                answered, value, error = pickle.loads(self._next_message(end, limit_s))
        return value, error

    def _next_message(self, end: float, limit_s: float) -> bytes:
        assert self._process is not None and self._connection is not None
        while not self._connection.poll(max(0.0, min(end - time.monotonic(), _POLL_S))):
            if time.monotonic() >= end:
                was_stopped = is_stopped(self._process.pid)
                self.end()
                if was_stopped:
                    raise Killed(f"the process was stopped for longer than {limit_s:g} s")
                raise TimedOut(f"took more than {limit_s:g} s")
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.recv_bytes(_MOST_ANSWER_BYTES)

    @contextlib.contextmanager
    def _telling_the_end(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            assert self._process is not None
            how, code = "closed its connection", None
            with contextlib.suppress(subprocess.TimeoutExpired):
                # the connection closes shortly before the process ends
                code = self._process.wait(_END_S)
                how = "ended with " + (
                    f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                )
            self.end()
            raise (Killed if code == -signal.SIGKILL else WorkerEnded)(
                f"the process {how}"
            ) from None
        except (OSError, pickle.UnpicklingError) as error:
            self.end()
            raise WorkerEnded(f"the process sent an answer that cannot be read ({error})") from None


def _spawn(
    environment: Mapping[str, str], memory_bytes: int, descriptor: int
) -> subprocess.Popen[bytes]:
    try:
        with holding_interrupts():
            return subprocess.Popen(
                # Unbuffered: output of a function must not be lost if its process is killed.
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "maxbatch.system.processes.worker_pool",
                    str(descriptor),
                    str(memory_bytes),
                ],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[descriptor],
                env=environment,
            )
    except OSError as error:
        raise WorkerEnded(f"cannot start a process ({error})") from error


def _call(
    function: Callable[P, Answer], *arguments: P.args, **options: P.kwargs
) -> tuple[Answer, None] | tuple[None, Exception]:
    try:
        return function(*arguments, **options), None
    except Exception as error:
        return None, error


def _answer(
    connection: Connection,
    function: Callable[[object], object],
    numbered: Sequence[tuple[int, object]],
) -> None:
    process = os.getpid()
    for number, item in numbered:
        answer = (number, *_call(function, item))
        if os.getpid() != process:
            os._exit(0)  # a process forked by the function, which returned from it
        connection.send(answer)


def _main() -> None:
    """Serves the connection in the first argument, a file descriptor, until it closes.

    The second argument is the bound on memory in bytes, 0 for none.
    """
    leave_signals_to_parent()
    end_with_parent()
    descriptor, memory_bytes = map(int, sys.argv[1:])
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, ConnectionError), Connection(descriptor) as connection:
        setup: Callable[[], Callable[[object], object]] = pickle.loads(connection.recv_bytes())
        function, error = _call(setup)
        connection.send((_SETUP, None, error))
        while function is not None:
            _answer(connection, function, connection.recv())


if __name__ == "__main__":
    _main()
