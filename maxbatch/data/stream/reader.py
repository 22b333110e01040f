"""Readers: samples of a stream in a given order, read ahead by Grain."""

from __future__ import annotations

import multiprocessing
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from absl import flags

from maxbatch.data.stream import grain
from maxbatch.data.stream.rows import RowArrays
from maxbatch.data.stream.samples import Indices
from maxbatch.system.processes.child_process import (
    end_with_parent,
    holding_interrupts,
    leave_signals_to_parent,
)

_THREADS = 8
_WINDOW = 16  # intervals for measuring the pace
# Enough tokens to make the cost per element of a Grain pipeline (30 us in threads, more between
# processes) negligible.
_BLOCK_TOKENS = 1 << 14
_MAX_THREADS = 4
_AHEAD_BYTES = 32 << 20  # bound of rows read ahead by time
_SLOT_BYTES = 12  # per token with segment and weight


class Order(Protocol):
    """The samples of a reader, by position from 0; small, since it is pickled for worker
    processes.
    """

    def __len__(self) -> int: ...

    # int64: indices at positions first to stop - 1
    def indices(self, first: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Contiguous:
    """The order of the stream itself: samples start to stop - 1."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise IndexError(
                f"samples {self.start} to {self.stop}: start must be at least 0 and at most stop"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def indices(self, first: int, stop: int) -> np.ndarray:
        return np.arange(self.start + first, self.start + stop, dtype=np.int64)


@dataclass(frozen=True)
class RowBlocks:
    """A Grain data source: element k is the samples at positions k * size to (k + 1) * size - 1 of
    an order.
    """

    batch: Callable[[Indices], RowArrays]  # returns samples by their indices, arrays [n, L]
    order: Order
    size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, block: int) -> RowArrays:
        first = block * self.size
        return self.batch(self.order.indices(first, min(first + self.size, len(self.order))))


class ReadAheadByTime:
    """An iterator over blocks in order, which reads ahead enough to bridge a stall of `seconds`.

    Args:
      seconds: time covered by blocks read ahead, at the recent pace of training.
    """

    def __init__(self, blocks: RowBlocks, seconds: float, least: int, most: int) -> None:
        self._blocks, self._seconds, self._least, self._most = (
            blocks,
            seconds,
            least,
            max(least, most),
        )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="maxbatch-ahead")
        self._reading: deque[Future[RowArrays]] = deque()
        self._next = 0  # next block to read
        # seconds of training, without waits here
        self._intervals: deque[float] = deque(maxlen=_WINDOW)
        self._returned = time.monotonic()

    def __iter__(self) -> ReadAheadByTime:
        return self

    def __next__(self) -> RowArrays:
        self._intervals.append(time.monotonic() - self._returned)
        # Grow by one block at a time; the first blocks are taken at once, which gives no pace.
        wanted = min(self._depth(), max(self._least, len(self._reading) + 2))
        while len(self._reading) < wanted and self._next < len(self._blocks):
            self._reading.append(self._pool.submit(self._blocks.__getitem__, self._next))
            self._next += 1
        if not self._reading:
            raise StopIteration
        block = self._reading.popleft().result()
        self._returned = time.monotonic()
        return block

    def _depth(self) -> int:
        pace = sum(self._intervals) / len(self._intervals)
        return min(self._most, max(self._least, int(self._seconds / max(pace, 1e-6))))

    def close(self) -> None:
        """Ends the threads and drops unfinished reads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ReadAhead(NamedTuple):
    """Settings of reading ahead; they do not affect the samples."""

    worker_count: int  # processes that read; 0 means threads of this one
    rows: int  # read ahead, at least 1 (rounded up to whole blocks)
    # seconds of training to read ahead for, at least; for rows in a remote store
    seconds: float = 0.0


class Reader:
    """A reader of a stream's samples in a given order, any number at a time, which reads ahead.

    Samples do not depend on the number of threads or worker processes. The first `take` starts
    them. Worker processes end with this process, even if it is killed. They get `batch` and `order`
    pickled.
    """

    def __init__(
        self,
        batch: Callable[[Indices], RowArrays],
        row_length: int,
        order: Order,
        read_ahead: ReadAhead,
    ):
        # At least four blocks make up the rows to read ahead, so that reading can overlap.
        size = max(1, min(_BLOCK_TOKENS // row_length, read_ahead.rows // 4))
        self._blocks = RowBlocks(batch, order, size)
        self._worker_count = read_ahead.worker_count
        self._prefetch_blocks = -(-read_ahead.rows // size)
        self._seconds = read_ahead.seconds
        self._most_blocks = _AHEAD_BYTES // (size * row_length * _SLOT_BYTES)
        self._iterator: grain.DatasetIterator[RowArrays] | ReadAheadByTime | None = None
        self._rest: RowArrays | None = None
        self._closed = False
        self.position = 0  # samples returned so far: the place of the next one in the order

    def take(self, count: int) -> RowArrays:
        """Returns the next `count` samples as arrays [n, L]; n < count only at the end of the
        order.

        Raises:
          ValueError: the reader is closed.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        end = min(self.position + count, len(self._blocks.order))
        blocks: list[RowArrays] = []
        while self.position < end:
            block, missing = self._next_block(), end - self.position
            if len(block["tokens"]) > missing:
                self._rest = {name: array[missing:] for name, array in block.items()}
                block = {name: array[:missing] for name, array in block.items()}
            blocks.append(block)
            self.position += len(block["tokens"])
        if len(blocks) == 1:
            return blocks[0]
        blocks = blocks or [self._blocks.batch([])]  # arrays of no rows, with their types
        return {name: np.concatenate([part[name] for part in blocks]) for name in blocks[0]}

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._closed = True
        if self._iterator is not None:
            self._finalizer()
        self._iterator = self._rest = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next_block(self) -> RowArrays:
        if self._rest is not None:
            block, self._rest = self._rest, None
            return block
        if self._iterator is None:
            self._iterator = self._start()
            # Grain's workers outlive a dropped iterator.
            self._finalizer = weakref.finalize(self, self._iterator.close)
            with holding_interrupts():  # of workers, which start now
                return next(self._iterator)
        return next(self._iterator)

    def _start(self) -> grain.DatasetIterator[RowArrays] | ReadAheadByTime:
        if self._seconds and not self._worker_count:
            return ReadAheadByTime(
                self._blocks, self._seconds, self._prefetch_blocks, self._most_blocks
            )
        blocks = grain.MapDataset.source(self._blocks)
        if not self._worker_count:
            threads = min(_MAX_THREADS, self._prefetch_blocks)
            return iter(blocks.to_iter_dataset(grain.ReadOptions(threads, self._prefetch_blocks)))
        # Grain's workers read absl flags, which only absl's main parses.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        buffer_size = max(1, self._prefetch_blocks // self._worker_count)
        options = grain.MultiprocessingOptions(
            num_workers=self._worker_count, per_worker_buffer_size=buffer_size
        )
        in_worker = blocks.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        return iter(in_worker.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(*_: int) -> None:
    """Ends a worker process with its parent, not earlier, since the parent may need rows to finish
    its step.
    """
    leave_signals_to_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in worker processes only"
    end_with_parent(parent.sentinel)
