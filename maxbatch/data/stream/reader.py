"""Samples of a stream in some order, read ahead by Grain."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np
from absl import flags

from maxbatch.data.stream.rows import Rows
from maxbatch.data.stream.samples import Indices
from maxbatch.system.child_process import end_with_parent, leave_signals_to_parent

# Enough tokens that the cost per element of a Grain pipeline (30 us in threads, more between processes)
# vanishes.
_BLOCK_TOKENS = 1 << 14
_MAX_THREADS = 4
# The length of an order without end; places and indices below it fit into 64 bits.
ENDLESS = 1 << 62


class Order(Protocol):
    """Which samples a reader hands out, and in which order; a place in it is counted from 0.

    It is pickled for worker processes, so it is small, and a function of its fields alone.
    """

    def __len__(self) -> int:
        """Returns the number of places; `ENDLESS` where there is no end."""
        ...

    def indices(self, first: int, stop: int) -> np.ndarray:
        """Returns the stream's indices at places first to stop - 1: int64[stop - first]."""
        ...


@dataclass(frozen=True)
class Contiguous:
    """The order of the stream itself: samples start to stop - 1 (None: without end).

    Raises:
      IndexError: a start below 0, beyond `ENDLESS`, or after stop.
    """

    start: int
    stop: int | None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= ENDLESS or (self.stop is not None and self.stop < self.start):
            raise IndexError(
                f"samples {self.start} to {self.stop}: start must be at least 0, at most 2^62, and at most stop"
            )

    def __len__(self) -> int:
        return ENDLESS if self.stop is None else self.stop - self.start

    def indices(self, first: int, stop: int) -> np.ndarray:
        return np.arange(self.start + first, self.start + stop, dtype=np.int64)


class RowsByIndex(Protocol):
    """Where samples come from, such as a stream; pickled for worker processes."""

    max_target_length: int

    def batch(self, indices: Indices) -> Rows:
        """Returns the samples with these indices, in their order, as arrays [n, L]."""
        ...


class RowBlocks:
    """A Grain data source: element k is the samples at places k size to (k + 1) size - 1 of an order."""

    def __init__(self, stream: RowsByIndex, order: Order, size: int):
        """Takes the samples of `order`, `size` rows an element, fewer in the last."""
        self.stream = stream
        self.order = order
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, block: int) -> Rows:
        first = block * self.size
        return self.stream.batch(self.order.indices(first, min(first + self.size, len(self.order))))


class Reader:
    """Hands out samples of a stream in a given order, in portions of any size, reading ahead.

    Threads or worker processes, many or few: the samples are the same, in the same order. Worker processes
    end with this process, also where it is killed.

    Attributes:
      position: samples handed out so far: the place in the order of the next one.
    """

    def __init__(self, stream: RowsByIndex, order: Order, *, worker_count: int, prefetch_rows: int):
        """Starts nothing yet; the first `take` does.

        Args:
          stream: where samples come from.
          order: which samples.
          worker_count: processes that read; 0 means threads of this one.
          prefetch_rows: rows read ahead, at least 1 (rounded up to whole blocks).
        """
        size = max(1, min(_BLOCK_TOKENS // stream.max_target_length, prefetch_rows // 4))
        self._blocks = RowBlocks(stream, order, size)
        self._worker_count = worker_count
        self._prefetch_blocks = -(-prefetch_rows // size)
        self._iterator: grain.DatasetIterator[Rows] | None = None
        self._rest: Rows | None = None
        self._closed = False
        self.position = 0

    def take(self, count: int) -> Rows:
        """Returns the next `count` samples as arrays [n, L]; n < count (0 at last) only where the order ends.

        Raises:
          ValueError: the reader is closed.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        wanted = min(count, len(self._blocks.order) - self.position)
        portions: list[Rows] = []
        missing = wanted
        while missing > 0:
            block = self._next_block()
            have = len(block["tokens"])
            if have > missing:
                self._rest = {name: array[missing:] for name, array in block.items()}
                block = {name: array[:missing] for name, array in block.items()}
            portions.append(block)
            missing -= min(have, missing)
        self.position += wanted
        if len(portions) == 1:
            return portions[0]
        portions = portions or [self._blocks.stream.batch([])]
        return {name: np.concatenate([portion[name] for portion in portions]) for name in portions[0]}

    def blocks(self) -> Iterator[Rows]:
        """Yields what is left in portions of the size that is cheapest, arrays [n, L]."""
        while self.position < len(self._blocks.order):
            yield self.take(self._blocks.size)

    def close(self) -> None:
        """Ends reading ahead, threads and processes included."""
        self._closed = True
        if self._iterator is not None:
            self._finalizer()
        self._iterator = self._rest = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next_block(self) -> Rows:
        if self._rest is not None:
            block, self._rest = self._rest, None
            return block
        if self._iterator is None:
            self._iterator = self._start()
            # Grain's workers outlive an iterator that is merely dropped.
            self._finalizer = weakref.finalize(self, self._iterator.close)
        return next(self._iterator)

    def _start(self) -> grain.DatasetIterator[Rows]:
        blocks = grain.MapDataset.source(self._blocks)
        if not self._worker_count:
            threads = min(_MAX_THREADS, self._prefetch_blocks)
            return iter(blocks.to_iter_dataset(grain.ReadOptions(threads, self._prefetch_blocks)))
        # Grain's workers read absl flags, which only absl's own main parses.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        ahead = max(1, self._prefetch_blocks // self._worker_count)
        options = grain.MultiprocessingOptions(num_workers=self._worker_count, per_worker_buffer_size=ahead)
        in_worker = blocks.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        return iter(in_worker.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(worker_index: int, worker_count: int) -> None:
    """Lets a worker process live exactly as long as its parent, which may want rows for the step that it finishes."""
    del worker_index, worker_count
    leave_signals_to_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in worker processes only"
    end_with_parent(parent.sentinel)
