"""A pool of worker processes in which a call that crashes its worker, or takes too long, fails alone.

A worker is an interpreter of its own, `python -m maxbatch.system.worker_pool`. It does not import the caller's main
module, leaves Ctrl-C and SIGTERM to its parent, ends with it, and prints to standard error.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from maxbatch.system.child_process import end_with_parent, leave_signals_to_parent

# For imports, which may take long but must not stop the caller for ever.
_SETUP_LIMIT_S = 300.0
# How often a silent worker is checked: a process that it has started may hold its end of the connection open.
_POLL_S = 0.5


class WorkerEnded(Exception):
    """The worker ended during the call; one line that says how."""


class TimedOut(WorkerEnded):
    """The call took longer than the limit, and the worker was killed."""


class WorkerPool:
    """Worker processes that call one function; a context manager.

    Each has a thread, which hands it items, reads its answers, and replaces it once it has ended.
    """

    def __init__(
        self,
        setup: Callable[[], Callable[[Any], Any]],
        workers: int,
        *,
        limit_s: float = math.inf,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers and does not wait for them.

        Args:
          setup: called once in each worker, new ones as well; returns the function that is called for each item.
            It is pickled, and so are items and answers.
          workers: how many.
          limit_s: seconds that a call may take.
          variables: environment variables of the workers, besides the caller's.
        """
        self._items: queue.SimpleQueue[deque[tuple[Future[Any], Any]] | None] = queue.SimpleQueue()
        self._is_closed = False
        pickled, environment = pickle.dumps(setup), {**os.environ, **(variables or {})}
        self._workers = [_Worker(pickled, limit_s, environment) for _ in range(workers)]
        self._started: list[Future[None]] = [Future() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name="maxbatch-worker", daemon=True)
            for pair in zip(self._workers, self._started, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_setup(self) -> None:
        """Waits until every worker is set up.

        Raises:
          WorkerEnded: a worker ended during its setup.
          Exception: whatever `setup` raised.
        """
        for started in self._started:
            started.result()

    def submit(self, items: Sequence[Any]) -> list[Future[Any]]:
        """Returns at once what the function will return for each item; batches are served in their order.

        A future raises what the function or a new worker's setup raised, WorkerEnded if the worker ended over the
        item, TimedOut, or CancelledError once the pool is closed.
        """
        if self._is_closed:
            raise RuntimeError("the worker pool is closed")
        futures: list[Future[Any]] = [Future() for _ in items]
        left = deque(zip(futures, items, strict=True))
        while left:
            # Large parts first, single items last, so that the workers finish together whatever an item takes
            # (guided self-scheduling: Polychronopoulos and Kuck 1987).
            size = -(-len(left) // (2 * len(self._workers)))
            self._items.put(deque(left.popleft() for _ in range(size)))
        return futures

    def close(self) -> None:
        """Kills the workers; calls under way are cancelled."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill_for_good()
            self._items.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, worker: _Worker, started: Future[None]) -> None:
        try:
            worker.start()
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
        while (part := self._items.get()) is not None:
            self._call(worker, part)
            # A worker that has just ended is replaced now, while nobody waits for it.
            with contextlib.suppress(Exception):
                worker.start()
        worker.end()

    def _call(self, worker: _Worker, part: deque[tuple[Future[Any], Any]]) -> None:
        while part and not self._is_closed:
            try:
                worker.start()
            except Exception as error:
                for future, _ in part:
                    future.set_exception(error)
                return
            try:
                for value, raised in worker.answers([item for _, item in part]):
                    future, _ = part.popleft()
                    future.set_result(value) if raised is None else future.set_exception(raised)
            except Exception as error:  # the worker ended, or an item or its answer cannot be pickled
                worker.end()
                if not self._is_closed:
                    part.popleft()[0].set_exception(error)
        for future, _ in part:
            future.cancel()


class _Worker:
    """One worker process, to be used by one thread."""

    def __init__(self, setup: bytes, limit_s: float, environment: Mapping[str, str]) -> None:
        self._setup, self._limit_s, self._environment = setup, limit_s, environment
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Starts the process unless it lives, and waits until it is set up.

        Raises:
          WorkerEnded: it cannot be started, or ended.
          Exception: whatever `setup` raised.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        with self._lock:
            if self._is_closed:
                raise WorkerEnded("the worker pool is closed")
            self._connection, theirs = multiprocessing.Pipe()
            with theirs:
                self._spawn(theirs.fileno())
        with self._telling_the_end():
            self._connection.send_bytes(self._setup)
        _, error = self._receive(_SETUP_LIMIT_S)
        if error is not None:
            self.end()
            raise error

    def answers(self, items: Sequence[Any]) -> Iterator[tuple[Any, Exception | None]]:
        """Yields what the function returned or raised for each item, as soon as it is there.

        Raises:
          WorkerEnded: the process ended over the next item.
        """
        assert self._connection is not None
        with self._telling_the_end():
            self._connection.send(items)
        for _ in items:
            yield self._receive(self._limit_s)

    def kill_for_good(self) -> None:
        """Kills the process, from any thread, and lets no other be started."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> int | None:
        """Kills the process, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        assert self._connection is not None and process.stdin is not None
        self._connection.close()
        process.stdin.close()
        return process.wait()

    def _spawn(self, descriptor: int) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "maxbatch.system.worker_pool", str(descriptor)],
                stdin=subprocess.PIPE, stdout=2, pass_fds=[descriptor], env=self._environment,
            )  # fmt: skip
        except OSError as error:
            raise WorkerEnded(f"cannot start a process ({error})") from error

    def _receive(self, limit_s: float) -> tuple[Any, Exception | None]:
        assert self._process is not None and self._connection is not None
        end = time.monotonic() + limit_s
        with self._telling_the_end():
            while not self._connection.poll(max(0.0, min(end - time.monotonic(), _POLL_S))):
                if time.monotonic() >= end:
                    self.end()
                    raise TimedOut(f"took more than {limit_s:g} s")
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
            answer: tuple[Any, Exception | None] = self._connection.recv()
            return answer

    @contextlib.contextmanager
    def _telling_the_end(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            raise WorkerEnded(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            self._process.wait(_POLL_S)  # the connection closes a moment before the process ends
        except subprocess.TimeoutExpired:
            self.end()
            return "the process closed its connection"
        code = self.end()
        assert code is not None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process ended with {how}"


def _work(connection: Connection) -> None:
    function, error = _call(pickle.loads(connection.recv_bytes()))
    connection.send((None, error))
    while error is None:
        for item in connection.recv():
            connection.send(_call(function, item))


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def main() -> None:
    """Serves the connection whose file descriptor is the argument, until it closes."""
    leave_signals_to_parent()
    end_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, ConnectionError), Connection(descriptor) as connection:
        _work(connection)


if __name__ == "__main__":
    main()
