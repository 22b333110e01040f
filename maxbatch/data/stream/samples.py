"""Mapping of a sample's index to a row of a source, through epochs and mixtures."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from maxbatch.data.stream.epochs import EpochOrder, SampleOrigin
from maxbatch.data.stream.mixture_order import Origins, StagedOrder
from maxbatch.data.stream.rows import RowArrays, RowDocument, RowSource
from maxbatch.data.stream.trained_tokens import TrainedTokens
from maxbatch.plan.holes import Holes

Indices = Sequence[int] | np.ndarray


class SampleRows(Protocol):
    """The samples of a stream, by index."""

    row_length: int

    def place(self, index: int) -> SampleOrigin: ...  # the origin of a sample

    # the samples with these indices, in their order
    def batch(self, indices: Indices) -> RowArrays: ...

    # int64: tokens of each own row of samples, [n] if they have one, else [n, K]
    def lengths(self, indices: Indices) -> np.ndarray: ...

    def stats(self) -> dict[str, object]: ...  # the figures of an epoch

    # the documents of a sample, one for each of its segments; none if rows are computed
    def documents(self, index: int) -> list[RowDocument]: ...

    # the samples among `first` to `end` - 1 that have the rows of some samples, in order
    def again(self, indices: Sequence[int], first: int, end: int) -> list[int]: ...


class Epochs:
    """The rows of one source, in an order of its epochs."""

    def __init__(self, rows: RowSource, order: EpochOrder):
        self.rows = rows
        self.row_length = rows.row_length
        self._order = order

    def place(self, index: int) -> SampleOrigin:
        return self._order.place(index)

    def batch(self, indices: Indices) -> RowArrays:
        return self.rows.batch([self.place(index).row for index in indices])

    def lengths(self, indices: Indices) -> np.ndarray:
        return self.rows.lengths([self.place(index).row for index in indices])

    def stats(self) -> dict[str, object]:
        return _figures([self.rows])

    def documents(self, index: int) -> list[RowDocument]:
        return self.rows.documents(self.place(index).row)

    def again(self, indices: Sequence[int], first: int, end: int) -> list[int]:
        rows = {self.place(index).row for index in indices}
        return self._order.indices_of(rows, first, end)


class InTurn:
    """An order of sources in turn, each sample once; otherwise like `StagedOrder`."""

    def __init__(self, num_rows: Sequence[int]):
        self._ends = np.cumsum(num_rows)
        self._begins = self._ends - num_rows

    def at(self, indices: Indices) -> Origins:
        index_n = np.asarray(indices, np.int64)
        source_n = np.searchsorted(self._ends, index_n, side="right")
        return Origins(source_n, index_n - self._begins[source_n])

    def counts(self, position: int) -> list[int]:
        counts: list[int] = (
            np.minimum(position, self._ends) - np.minimum(position, self._begins)
        ).tolist()
        return counts


class Mixed:
    """Samples of several sources, numbered as in their order."""

    def __init__(self, sources: Mapping[str, Epochs], order: StagedOrder | InTurn):
        self._order = order
        self._names, self._epochs = list(sources), list(sources.values())
        self.row_length = self._epochs[0].row_length

    def place(self, index: int) -> SampleOrigin:
        source, place = self._origin(index)
        return self._epochs[source].place(place)._replace(source=self._names[source])

    def _origin(self, index: int) -> tuple[int, int]:
        """Returns the number of a sample's source, and the sample's number in it."""
        source, place = (array.tolist()[0] for array in self._order.at([operator.index(index)]))
        return source, place

    def batch(self, indices: Indices) -> RowArrays:
        source_n, place_n = self._order.at(indices)
        # Without indices, the first source gives arrays of no rows with the right types.
        batches = [
            self._epochs[source].batch(place_n[source_n == source].tolist())
            for source in np.unique(source_n).tolist() or [0]
        ]

        # Joined, the samples stand by source; the inverse of that order puts them back.
        place_in_joined_n = np.argsort(np.argsort(source_n, kind="stable"))
        return {
            name: np.concatenate([batch[name] for batch in batches])[place_in_joined_n]
            for name in batches[0]
        }

    def lengths(self, indices: Indices) -> np.ndarray:
        source_n, place_n = self._order.at(indices)
        lengths = [
            self._epochs[source].lengths(place_n[source_n == source].tolist())
            for source in np.unique(source_n).tolist() or [0]
        ]
        place_in_joined_n = np.argsort(np.argsort(source_n, kind="stable"))
        return np.concatenate(lengths)[place_in_joined_n]

    def counts(self, position: int) -> dict[str, int]:
        """Returns the number of samples of each source among samples 0 to position - 1."""
        return dict(zip(self._names, self._order.counts(position), strict=True))

    def documents(self, index: int) -> list[RowDocument]:
        source, place = self._origin(index)
        return self._epochs[source].documents(place)

    def again(self, indices: Sequence[int], first: int, end: int) -> list[int]:
        places: dict[int, list[int]] = {}
        for source, place in map(self._origin, indices):
            places.setdefault(source, []).append(place)
        before, until = self._order.counts(first), self._order.counts(end)
        samples: list[int] = []
        for source, of_source in places.items():
            again = self._epochs[source].again(of_source, before[source], until[source])
            samples += [self._index(source, place, first, end) for place in again]
        return sorted(samples)

    def _index(self, source: int, place: int, first: int, end: int) -> int:
        """Returns the sample, of `first` to `end` - 1, that is sample `place` of a source."""
        samples = range(first, end)

        def count_after(sample: int) -> int:
            return self._order.counts(sample + 1)[source]

        return samples[bisect_left(samples, place + 1, key=count_after)]

    def stats(self) -> dict[str, object]:
        sources = {
            name: epochs.stats() for name, epochs in zip(self._names, self._epochs, strict=True)
        }
        together = _figures([epochs.rows for epochs in self._epochs]) | {"sources": sources}
        if isinstance(self._order, InTurn):
            return together
        for stage in self._order.stages:
            name = f"weight from {stage.start}" if stage.start else "weight"
            for figures, weight in zip(sources.values(), stage.weights, strict=True):
                figures[name] = float(weight)
        return together


class KeptCounts:
    """The samples of each source of a mixture among those that holes leave.

    Limits: the holes behind a position are counted one by one, each once where positions rise.
    """

    def __init__(self, samples: Mixed, holes: Holes):
        self._samples, self._holes = samples, holes
        self._restart()

    def _restart(self) -> None:
        self._position, self._left_out = 0, Counter[str]()

    def at(self, position: int) -> dict[str, int]:
        """Returns the counts among the own numbers below a stream position."""
        if position < self._position:
            self._restart()
        for first, end in self._holes.overlapping(self._position, position):
            self._left_out.update(self._samples.counts(end))
            self._left_out.subtract(self._samples.counts(first))
        self._position = position
        counts = self._samples.counts(position)
        return {name: count - self._left_out[name] for name, count in counts.items()}


def _figures(sources: Sequence[RowSource]) -> dict[str, object]:
    samples = sum(rows.num_rows for rows in sources)
    slots = sum(rows.num_rows * rows.row_length for rows in sources)
    tokens = sum(rows.num_tokens for rows in sources)
    return {
        "samples": samples,
        "slots": slots,
        "tokens": tokens,
        "packing_efficiency": tokens / slots,
        "documents": sum(rows.num_documents for rows in sources),
        "skipped_records": sum(rows.skipped_records for rows in sources),
        **_trained(sources),
    }


def _trained(sources: Sequence[RowSource]) -> dict[str, object]:
    """Returns the figures of trained tokens; empty where all are trained on."""
    figures = [rows.trained for rows in sources if rows.trained]
    if not figures:
        return {}
    tokens = TrainedTokens(*map(sum, zip(*(trained.tokens for trained in figures), strict=True)))
    return {
        "overlong_records": sum(trained.num_overlong for trained in figures),
        "trained_tokens": tokens.total,
        "trained_tokens_per_sample": {"mean": tokens.mean, "std": tokens.std},
    }
