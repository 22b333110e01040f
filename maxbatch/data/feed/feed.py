"""From positions in the stream to sharded global batches, ahead of the step that trains on them.

Legend: the step that starts at `samples_seen = s` with batch B trains on stream[s : s + B]. Micro-batch j holds
stream[s + j * M : s + (j + 1) * M], and batch shard d its contiguous d-th part: row r of the flat batch is
row r % M of micro-batch r // M. Rows past the batch are padding: segments and weights of zero.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.data.stream.reader import Contiguous, Reader
from maxbatch.data.stream.stream import Stream
from maxbatch.plan.rampup import RampupBatchManager, Stage


class Portion(NamedTuple):
    """Consecutive batches of one size and shape."""

    first_sample: int  # where the first of them starts
    num_rows: int  # B of each
    num_batches: int
    shape: BatchShape


class HostOrder:
    """The order of the samples that one host stages: of every batch, the rows that its own slots hold.

    Args:
      placement: says which rows of a batch these are.
      portions: the batches ahead.
    """

    def __init__(self, placement: Placement, portions: Sequence[Portion]) -> None:
        self._portions = portions
        # Per portion: the rows of a batch that are this host's, and the place in this order of the first of them.
        self._rows = [
            placement.local_rows(portion.shape)[placement.wanted(portion.num_rows, portion.shape)]
            for portion in portions
        ]
        sizes = [p.num_batches * len(rows) for p, rows in zip(portions, self._rows, strict=True)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._size = sum(sizes)

    def __len__(self) -> int:
        return self._size

    def indices(self, first: int, stop: int) -> np.ndarray:
        """The stream's indices at places first to stop - 1: int64[stop - first]."""
        found = [np.zeros(0, np.int64)]
        for start, portion, rows in zip(self._starts, self._portions, self._rows, strict=True):
            end = start + portion.num_batches * len(rows)
            if first < end and start < stop:
                place_n = np.arange(max(first, start) - start, min(stop, end) - start)
                batch_n, row_n = np.divmod(place_n, len(rows))
                found.append(portion.first_sample + batch_n * portion.num_rows + rows[row_n])
        return np.concatenate(found)


class Loader:
    """Stages consecutive batches: reads this host's rows ahead, pads them and puts them on its devices.

    Args:
      stream: where rows come from; None on a host that reads none.
      placement: which rows, and where they go.
      portions: the batches ahead. Where this host stages whole batches, their shapes are open until they are asked
        for: any cut takes the same rows in the same order.
    """

    def __init__(self, stream: Stream | None, placement: Placement, portions: Sequence[Portion]) -> None:
        self._placement = placement
        self._reader: Reader | None = None
        if stream is not None and placement.stages_all:
            last = portions[-1]
            end = last.first_sample + last.num_batches * last.num_rows
            self._reader = stream.reader_of(Contiguous(portions[0].first_sample, end))
        elif stream is not None:
            self._reader = stream.reader_of(HostOrder(placement, portions))

    def batch(self, num_rows: int, shape: BatchShape) -> Batch:
        """The next batch, of `num_rows` real rows."""
        if self._reader is None:
            return self._placement.padding(shape)
        wanted = int(self._placement.wanted(num_rows, shape).sum())
        return self._placement.stage(self._reader.take(wanted), num_rows, shape)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reader:
            self._reader.close()


class StagedBatch(NamedTuple):
    """One global batch on its devices, and what the step must know of it."""

    batch: Batch
    first_sample: int  # samples_seen before the step
    num_rows: int  # real rows, padding left out
    stage: int  # index into the manager's stages
    shape: BatchShape
    num_micro_batches: int  # of the A, those that hold real rows


class Feed:
    """Iterates over the global batches of a run, prepared on a thread of its own.

    Args:
      stream: the training stream; None on a host that reads none.
      manager: says how many rows the step at each position trains on.
      shape_for: how a batch of a stage, its first one or not, is cut at the moment; every cut trains the same. With
        several hosts it is a function of its arguments alone, so that they agree.
      placement: where the batches go.
      first_step: updates done before the first batch.
      total_steps: updates of the whole run.
      depth: batches on the devices ahead of the one in training.
    """

    def __init__(
        self,
        stream: Stream | None,
        manager: RampupBatchManager,
        shape_for: Callable[[Stage, bool], BatchShape],
        placement: Placement,
        first_step: int,
        total_steps: int,
        depth: int = 2,
    ) -> None:
        self._stream, self._manager = stream, manager
        self._shape_for, self._placement = shape_for, placement
        self._position = manager.position_after(first_step)
        self._end = manager.position_after(total_steps)
        self._queue: queue.Queue[StagedBatch | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self.waited_s = 0.0  # seconds that the last `next` waited for its batch
        self._thread = threading.Thread(target=self._produce, name="maxbatch-feed", daemon=True)
        self._thread.start()

    def _portions(self) -> list[Portion]:
        """What is ahead, a portion per stage and one for a last batch that is not full."""
        manager, position = self._manager, self._position
        portions = []
        while position < self._end:
            stage, batch = manager.stages[manager.stage_at(position)], manager.rows_at(position)
            end_of_stage = stage.first_sample + (stage.num_samples or 0)
            num_batches = (min(end_of_stage, self._end) - position) // batch
            portions.append(Portion(position, batch, num_batches, self._shape_for(stage, True)))
            position += num_batches * batch
        return portions

    def _batches(self) -> Iterator[StagedBatch]:
        manager, position = self._manager, self._position
        if position == self._end:
            return
        last_stage: int | None = None
        with Loader(self._stream, self._placement, self._portions()) as loader:
            while position < self._end:
                num_rows = manager.rows_at(position)
                stage = manager.stage_at(position)
                shape = self._shape_for(manager.stages[stage], stage != last_stage)
                last_stage = stage
                batch = loader.batch(num_rows, shape)
                yield StagedBatch(batch, position, num_rows, stage, shape, -(-num_rows // shape.micro_batch))
                position += num_rows

    def _produce(self) -> None:
        try:
            for feeding in self._batches():
                if not self._put(feeding):
                    return
            self._put(None)
        except BaseException as error:  # handed to the training thread, which raises it
            self._put(error)

    def _put(self, item: StagedBatch | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[StagedBatch]:
        return self

    def __next__(self) -> StagedBatch:
        start = time.perf_counter()
        item = self._queue.get()
        self.waited_s = time.perf_counter() - start
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
