"""Mixtures that change along the stream: at stated positions the weights become others, exactly there.

    dataset_path:
      0:   {web/*.jsonl: 0.9, code.jsonl: 0.1}
      1Bt: {web/*.jsonl: 0.5, code.jsonl: 0.5}

A position counts samples, or tokens with the suffix t (rounded up to a sample); the suffixes K, M and B scale it. In
one line the mapping is written in braces. Each source goes on in its own order where a stage begins: its next sample is
the one after its last, in whichever stage that was.

Legend: K sources, T stages, n indices asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from maxbatch.data.stream.mixture_order import Origins, WeightedOrder


class MixtureStage(NamedTuple):
    """The weights from a position on."""

    start: int  # its first sample
    weights: tuple[Fraction, ...]  # of every source, 0 for one that rests; they add up to 1


class StagedOrder:
    """The source of every sample of a mixture by stages, in closed form: O(log T) stages to find, any index alike.

    Stage t is the `WeightedOrder` of its weights, from its first sample on; what it counts of a source is added to what
    the stages before it took. So within a stage every window of 1000 samples keeps the promise of `WeightedOrder`.
    """

    def __init__(self, stages: Sequence[MixtureStage]) -> None:
        starts = [stage.start for stage in stages]
        if starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"stages begin at {starts}: must begin at 0 and rise")
        self.stages = tuple(stages)
        self._starts = starts
        self._active = [[k for k, weight in enumerate(stage.weights) if weight] for stage in stages]
        self._orders = [
            WeightedOrder([stage.weights[k] for k in active])
            for stage, active in zip(stages, self._active, strict=True)
        ]
        self._before_TxK = [[0] * len(stages[0].weights)]  # samples of each source before each stage
        for t in range(1, len(stages)):
            self._before_TxK.append(self._counts_in(t - 1, starts[t]))

    def __reduce__(self) -> tuple[type[StagedOrder], tuple[tuple[MixtureStage, ...]]]:
        return StagedOrder, (self.stages,)

    @property
    def weights(self) -> tuple[Fraction, ...]:
        """The weights of the first stage."""
        return self.stages[0].weights

    def at(self, indices: Sequence[int] | np.ndarray) -> Origins:
        """Returns the origins of the samples with these indices, each at least 0."""
        try:
            index_n = np.asarray(indices, np.int64)
        except OverflowError:
            index_n = np.array([int(index) for index in indices], object)
        stage_n = np.array([bisect_right(self._starts, index) - 1 for index in index_n.tolist()], np.int64)
        source_n, place_n = np.empty(len(index_n), np.int64), np.empty(len(index_n), index_n.dtype)
        for t in np.unique(stage_n).tolist():
            here = stage_n == t
            source, place = self._orders[t].at(index_n[here] - self._starts[t])
            source_n[here] = np.array(self._active[t])[source]
            place_n[here] = np.array(self._before_TxK[t], index_n.dtype)[source_n[here]] + place
        return Origins(source_n, place_n)

    def counts(self, position: int) -> list[int]:
        """Returns the number of samples of each source among samples 0 to position - 1."""
        return self._counts_in(max(0, bisect_right(self._starts, position) - 1), position)

    def _counts_in(self, stage: int, position: int) -> list[int]:
        """Returns the counts at a position of this stage, its end included."""
        counts = list(self._before_TxK[stage])
        for k, count in zip(
            self._active[stage], self._orders[stage].counts(position - self._starts[stage]), strict=True
        ):
            counts[k] += count
        return counts
