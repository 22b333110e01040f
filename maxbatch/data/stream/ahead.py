"""Reading ahead by time: enough blocks for some seconds of training, so that a store that stalls for as long
does not stop training. Grain's prefetch, used for data on a disk, counts elements.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_THREADS = 8
_WINDOW = 16  # intervals that the pace is measured over


class Blocks(Protocol[T_co]):
    """Elements by their index; reading one may take long."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class ReadAheadByTime(Generic[T]):
    """Iterates over elements in order, reading ahead those needed within the next seconds.

    Args:
      blocks: the elements to read.
      seconds: the time that the elements read ahead should last, at the recent pace of training.
      least: elements read ahead at any pace.
      most: elements read ahead at most.
    """

    def __init__(self, blocks: Blocks[T], seconds: float, least: int, most: int) -> None:
        self._blocks, self._seconds, self._least, self._most = blocks, seconds, least, max(least, most)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="maxbatch-ahead")
        self._reading: deque[Future[T]] = deque()
        self._next = 0  # the element that is read next
        self._intervals: deque[float] = deque(maxlen=_WINDOW)  # seconds that training took, without its waits here
        self._returned = time.monotonic()

    def __iter__(self) -> ReadAheadByTime[T]:
        return self

    def __next__(self) -> T:
        self._intervals.append(time.monotonic() - self._returned)
        # It grows by one element at a time: the first elements are taken at once, which shows no pace.
        wanted = min(self._depth(), max(self._least, len(self._reading) + 2))
        while len(self._reading) < wanted and self._next < len(self._blocks):
            self._reading.append(self._pool.submit(self._blocks.__getitem__, self._next))
            self._next += 1
        if not self._reading:
            raise StopIteration
        found = self._reading.popleft().result()
        self._returned = time.monotonic()
        return found

    def _depth(self) -> int:
        pace = sum(self._intervals) / len(self._intervals)
        return min(self._most, max(self._least, int(self._seconds / max(pace, 1e-6))))

    def close(self) -> None:
        """Ends the threads; unfinished reads are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
