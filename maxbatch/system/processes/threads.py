"""Calls of functions that wait for storage: many at a time, or one on a thread of its own."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")


def in_threads(do: Callable[[T], R], items: Iterable[T], num_threads: int) -> list[R]:
    """Applies a function to items in parallel; re-raises the first failure, and cancels calls that
    have not begun.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads, "maxbatch-files") as threads:
        return list(threads.map(do, items))


def each_in_threads(do: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yields a function's results in order; takes few items before they are needed, however many
    there are.
    """
    from concurrent.futures import ThreadPoolExecutor

    remaining, waiting = iter(items), deque["Future[R]"]()
    threads = ThreadPoolExecutor(num_threads, "maxbatch-files")
    try:
        while True:
            for item in itertools.islice(remaining, 4 * num_threads - len(waiting)):
                waiting.append(threads.submit(do, item))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def on_own_thread(do: Callable[[], None], name: str) -> None:
    """Runs a function on a thread of that name, and waits for it; re-raises its failure.

    Signal handlers of Python run on the main thread, so none stops the function halfway.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
