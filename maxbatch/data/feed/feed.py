"""Sharded global batches from positions in the stream, prepared ahead of training.

Legend: the step that starts at `samples_seen = s` with batch B trains on stream[s : s + B].
Micro-batch j is stream[s + j * M : s + (j + 1) * M], and batch shard d its d-th contiguous part:
row r of the flat batch is row r % M of micro-batch r // M. Rows past the batch are padding: their
segments and weights are zero.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.data.feed.passes import Passes, packed, token_counts
from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.data.stream.reader import Contiguous, Reader
from maxbatch.data.stream.stream import Stream
from maxbatch.plan.rampup import PlannedStep, RampupBatchManager, Stage

_DEPTH = 2  # batches on the devices ahead of the one in training


class BatchSeries(NamedTuple):
    """Consecutive batches of one size and shape."""

    first_sample: int  # of the first batch
    num_rows: int  # B of each batch
    num_batches: int
    shape: BatchShape


def in_passes(first: int, end: int, shape: BatchShape) -> list[BatchSeries]:
    """Returns samples `first` to `end` - 1 in batches of one micro-batch, the last perhaps
    smaller.
    """
    size = shape.micro_batch
    full, rest = divmod(end - first, size)
    series = [BatchSeries(first, size, full, shape), BatchSeries(end - rest, rest, 1, shape)]
    return [batches for batches in series if batches.num_rows and batches.num_batches]


class HostOrder:
    """The order of one host's samples: the rows in its slots of every batch."""

    def __init__(self, placement: Placement, series: Sequence[BatchSeries]) -> None:
        self._series = series
        # Per series: this host's rows of a batch, and the index of the first in this order.
        self._rows = [
            placement.local_rows(batches.shape)[placement.wanted(batches.num_rows, batches.shape)]
            for batches in series
        ]
        sizes = [p.num_batches * len(rows) for p, rows in zip(series, self._rows, strict=True)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._size = sum(sizes)

    def __len__(self) -> int:
        return self._size

    def indices(self, first: int, stop: int) -> np.ndarray:
        """Returns the stream's indices at places first to stop - 1: int64[stop - first]."""
        index_arrays = [np.zeros(0, np.int64)]
        for start, batches, rows in zip(self._starts, self._series, self._rows, strict=True):
            end = start + batches.num_batches * len(rows)
            if first < end and start < stop:
                place_n = np.arange(max(first, start) - start, min(stop, end) - start)
                batch_n, row_n = np.divmod(place_n, len(rows))
                index_arrays.append(batches.first_sample + batch_n * batches.num_rows + rows[row_n])
        return np.concatenate(index_arrays)


class BatchLoader:
    """A reader of consecutive batches: reads this host's rows ahead, pads them and puts them on its
    devices.

    Args:
      stream: source of the rows; None on a host without rows.
      series: the batches ahead. A host that stages whole batches may take other shapes, since any
        cut has the same rows in order.
    """

    def __init__(
        self, stream: Stream | None, placement: Placement, series: Sequence[BatchSeries]
    ) -> None:
        self._placement, self._series = placement, series
        self._reader: Reader | None = None
        if stream is not None and placement.stages_all:
            last = series[-1]
            end = last.first_sample + last.num_batches * last.num_rows
            self._reader = stream.reader_of(Contiguous(series[0].first_sample, end))
        elif stream is not None:
            self._reader = stream.reader_of(HostOrder(placement, series))

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yields the batches of the series, each with its number of real rows."""
        for series in self._series:
            for _ in range(series.num_batches):
                yield series.num_rows, self.batch(series.num_rows, series.shape)

    def batch(self, num_rows: int, shape: BatchShape) -> Batch:
        """Returns the next batch, of `num_rows` real rows."""
        if self._reader is None:
            return self._placement.padding(shape)
        wanted = int(self._placement.wanted(num_rows, shape).sum())
        return self._placement.stage(self._reader.take(wanted), num_rows, shape)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reader:
            self._reader.close()


class PackedLoader:
    """A reader of consecutive batches whose samples share rows.

    A host that stages whole batches reads the samples ahead, and packs them by their tokens. Another
    one finds the lengths of all samples by index, and reads the samples of its own rows.

    Args:
      stream: source of the samples; None on a host without rows.
      series: the batches ahead.
      rows_per_sample: rows of the placement's length that a sample has on its own.
      rows_together: as `Passes.of` takes them.
    """

    def __init__(
        self,
        stream: Stream | None,
        placement: Placement,
        series: Sequence[BatchSeries],
        rows_per_sample: int,
        rows_together: int | None = None,
    ) -> None:
        self._stream, self._placement = stream, placement
        self._rows_per_sample, self._rows_together = rows_per_sample, rows_together
        self._reader: Reader | None = None
        if stream is not None and placement.stages_all:
            last = series[-1]
            end = last.first_sample + last.num_batches * last.num_rows
            self._reader = stream.reader_of(Contiguous(series[0].first_sample, end))

    def batch(self, planned: PlannedStep, shape: BatchShape) -> tuple[Batch, Passes | None]:
        """Returns the batch of the next update, and its passes; None on a host without rows."""
        if self._stream is None:
            return self._placement.padding(shape), None
        length = self._placement.length
        if self._reader is not None:
            samples = self._reader.take(planned.num_rows)
            counts = token_counts(samples["segments"], self._rows_per_sample)
            passes = Passes.of(counts, length, shape.micro_batch, self._rows_together)
            return self._placement.stage(packed(samples, passes), passes.num_rows, shape), passes
        first, end = planned.first_sample, planned.first_sample + planned.num_rows
        lengths = self._stream.lengths(np.arange(first, end))
        passes = Passes.of(lengths, length, shape.micro_batch, self._rows_together)
        wanted = self._placement.wanted(passes.num_rows, shape)
        here, own = passes.of_rows(self._placement.local_rows(shape)[wanted])
        rows = packed(self._stream.batch(first + here), own)
        return self._placement.stage(rows, passes.num_rows, shape), passes

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reader:
            self._reader.close()


class StagedBatch(NamedTuple):
    """A global batch on its devices, and its update."""

    batch: Batch
    planned: PlannedStep
    shape: BatchShape
    num_micro_batches: int  # micro-batches with real rows, of the A
    waited_s: float = 0.0  # the time that training waited for it
    passes: Passes | None = None  # of samples that share rows


class Feed:
    """An iterator over the global batches of a run, prepared on a thread.

    Args:
      stream: the training stream; None on a host without rows.
      shape_for: returns the shape for a batch, given its stage and whether it is the stage's first;
        the update does not depend on it. With several hosts it must depend on its arguments only,
        so that they agree.
      packs: rows that a sample has on its own, if samples share rows; the placement must have
        their arrays. 0: they do not.
      rows_together: of samples that share rows, as `Passes.of` takes them.
    """

    def __init__(
        self,
        stream: Stream | None,
        manager: RampupBatchManager,
        shape_for: Callable[[Stage, bool], BatchShape],
        placement: Placement,
        first_step: int,
        packs: int = 0,
        rows_together: int | None = None,
    ) -> None:
        self._stream, self._manager = stream, manager
        self._packs, self._rows_together = packs, rows_together
        self._shape_for, self._placement = shape_for, placement
        self._first_step = first_step
        self._queue: queue.Queue[StagedBatch | BaseException | None] = queue.Queue(_DEPTH)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="maxbatch-feed", daemon=True)
        self._thread.start()

    def _series(self) -> list[BatchSeries]:
        """Returns the batches ahead: a series per stage, and one for a last batch that is not
        full.
        """
        manager, series = self._manager, []
        for stage in manager.stages:
            step, end = (
                max(stage.first_step, self._first_step),
                stage.first_step + (stage.num_steps or 0),
            )
            while step < end:
                position = manager.position_after(step)
                num_rows, last_rows = (
                    manager.rows_at(position),
                    manager.rows_at(manager.position_after(end - 1)),
                )
                num_batches = end - step - (last_rows < num_rows)  # a smaller last one comes after
                series.append(
                    BatchSeries(position, num_rows, num_batches, self._shape_for(stage, True))
                )
                step += num_batches
        return series

    def _batches(self) -> Iterator[StagedBatch]:
        series = self._series()
        if not series:
            return
        if self._packs:
            with PackedLoader(
                self._stream, self._placement, series, self._packs, self._rows_together
            ) as packing:
                for planned, shape in self._shapes():
                    batch, passes = packing.batch(planned, shape)
                    most = shape.max_micro_batches
                    num_passes = most if passes is None else passes.num_passes
                    yield StagedBatch(batch, planned, shape, num_passes, passes=passes)
            return
        with BatchLoader(self._stream, self._placement, series) as loader:
            for planned, shape in self._shapes():
                batch = loader.batch(planned.num_rows, shape)
                yield StagedBatch(batch, planned, shape, -(-planned.num_rows // shape.micro_batch))

    def _shapes(self) -> Iterator[tuple[PlannedStep, BatchShape]]:
        """Yields the updates ahead, each with the shape of its batch."""
        last_stage: int | None = None
        for planned in self._manager.steps_from(self._first_step):
            opens_stage, last_stage = planned.stage != last_stage, planned.stage
            yield planned, self._shape_for(self._manager.stages[planned.stage], opens_stage)

    def _produce(self) -> None:
        try:
            for staged in self._batches():
                if not self._put(staged):
                    return
            self._put(None)
        except BaseException as error:  # re-raised by the iterating thread
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
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item._replace(waited_s=time.perf_counter() - start)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
