"""The order of the sources in a mixture: the source of each sample in closed form, exact in both
directions.

Samples come in blocks of W = 1000 slots. Source k of weight w_k has floor(W w_k) slots of its own,
at the same places in every block, spread evenly. The r slots that remain (r < K, at the same places
in every block too) go to the sources by systematic sampling (Madow and Madow 1944): the fractional
parts f_k = W w_k - floor(W w_k), end to end, cover a line of length r; extra slot j of block b goes
to the source whose part contains u_b + j, where u_b = (b s mod q) / q, q is the common denominator
of the parts, and s is coprime to q.

Every window of W consecutive samples has floor(W w_k) or floor(W w_k) + 1 samples of source k.
Proof: the window is the end of a block b and the start of block b + 1, so it has each place once,
and floor(W w_k) fixed slots of source k. Its extra slots are u_b + m, ..., u_b + r - 1 and u_{b+1},
..., u_{b+1} + m - 1 for some m. These points are at least 1 apart, except for the last of block b +
1 and the first of block b, which are 1 - s/q apart if u grows and 2 - s/q apart if it wraps around.
A part of length f_k <= 1 - s/q (half open) never contains two of them. So s must satisfy s/q <= 1 -
max f_k, as s = 1 always does.

The shares are exact: b s mod q takes each value 0 .. q - 1 once in q blocks, so that a part of q
f_k steps is hit exactly q f_k times. The number of hits in the first b blocks is a sum of floors,
computed in O(log q) steps.

The stride s is chosen so that its multiples spread evenly in the short run as well: the count of
the first n samples stays within about 5 + 1 / (1 - max f_k) of its share for every n.

A mixture may change along the stream: at stated positions the weights become others, exactly there.

    dataset_path:
      0:   {web/*.jsonl: 0.9, code.jsonl: 0.1}
      1Bt: {web/*.jsonl: 0.5, code.jsonl: 0.5}

A position counts samples, or tokens with the suffix t (rounded up to a sample), such as 500K or
256Mit. In one line the mapping is written in braces. Each source goes on in its own order where a
stage begins: its next sample is the one after its last, in whichever stage that was.

Legend: K sources, T stages, W = 1000, n indices asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WINDOW = 1000
_GOLDEN = (5**0.5 - 1) / 2
_CANDIDATES = 64


class Origins(NamedTuple):
    """The origins of n samples of a mixture."""

    source_n: np.ndarray  # int64, number of the source
    # samples of that source before; int64, or Python ints (dtype object) beyond 64 bits
    place_n: np.ndarray


class _Block(NamedTuple):
    before_K: list[int]  # samples of each source before the block
    source_W: np.ndarray  # source of each slot
    place_W: np.ndarray  # samples of that source before it in the block


class WeightedOrder:
    """The source of every sample, by the exact weights of the sources, which add up to 1."""

    def __init__(self, weights: Sequence[Fraction]):
        if sum(weights) != 1 or min(weights) <= 0:
            raise ValueError(f"weights {weights}: must be above 0 and add up to 1")
        self.weights = tuple(weights)
        self._fixed = [math.floor(WINDOW * weight) for weight in weights]
        remainders = [
            WINDOW * weight - fixed for weight, fixed in zip(weights, self._fixed, strict=True)
        ]
        self._steps = math.lcm(*(remainder.denominator for remainder in remainders))  # q
        self._widths = [int(remainder * self._steps) for remainder in remainders]  # q f_k
        self._stride = _stride(self._steps, max(self._widths))  # s
        # Source k's part is the steps _begins[k] to _begins[k] + _widths[k] - 1 of the line.
        self._begins = [sum(self._widths[:k]) for k in range(len(weights))]
        self._pattern_W = _pattern([*self._fixed, WINDOW - sum(self._fixed)])
        self._extra_slots = np.flatnonzero(self._pattern_W == len(weights))
        self._block = lru_cache(maxsize=8)(self._make_block)

    def __reduce__(self) -> tuple[type[WeightedOrder], tuple[Sequence[Fraction]]]:
        return WeightedOrder, (self.weights,)

    def at(self, indices: Sequence[int] | np.ndarray) -> Origins:
        """Returns the origins of the samples with these indices, each at least 0.

        The cost is per block of 1000 samples, the same for any index; consecutive indices share
        blocks.
        """
        index_n = _numbers(indices)
        block_n, slot_n = index_n // WINDOW, (index_n % WINDOW).astype(np.int64)
        source_n = np.empty(len(index_n), np.int64)
        place_n = np.empty(len(index_n), index_n.dtype)
        for block in dict.fromkeys(block_n.tolist()):
            before_K, source_W, place_W = self._block(block)
            in_block = block_n == block
            source_n[in_block] = source_W[slot_n[in_block]]
            place_n[in_block] = (
                np.array(before_K, index_n.dtype)[source_n[in_block]] + place_W[slot_n[in_block]]
            )
        return Origins(source_n, place_n)

    def counts(self, position: int) -> list[int]:
        """Returns the number of samples of each source among samples 0 to position - 1. O(K log q)
        at any position.
        """
        number, slots = divmod(position, WINDOW)
        block = self._block(number)
        in_block_K = np.bincount(block.source_W[:slots], minlength=len(self.weights))
        return [
            before + count
            for before, count in zip(block.before_K, in_block_K.tolist(), strict=True)
        ]

    def _make_block(self, block: int) -> _Block:
        source_W = self._pattern_W.copy()
        offset = block * self._stride % self._steps
        for extra, slot in enumerate(self._extra_slots):
            source_W[slot] = bisect_right(self._begins, offset + extra * self._steps) - 1
        order = np.argsort(source_W, kind="stable")
        place_W = np.empty(WINDOW, np.int64)
        number = np.bincount(source_W, minlength=len(self.weights))
        place_W[order] = np.arange(WINDOW) - np.repeat(np.cumsum(number) - number, number)
        before_K = [
            block * fixed + _hits(block, self._stride, self._steps, begin, width)
            for fixed, begin, width in zip(self._fixed, self._begins, self._widths, strict=True)
        ]
        return _Block(before_K, source_W, place_W)


def _numbers(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns int64, or Python ints beyond 64 bits."""
    try:
        return np.asarray(indices, np.int64)
    except OverflowError:
        return np.array([int(index) for index in indices], object)


def _stride(steps: int, widest: int) -> int:
    """Returns s: coprime to q = `steps`, at most q - `widest`, with multiples that spread evenly
    mod q.

    The partial quotients of s / q bound how evenly b s mod q fills the circle (Kuipers and
    Niederreiter 1974, "Uniform Distribution of Sequences", chapter 2, section 3). Those of powers
    of the golden ratio are small, so s is the best of the numbers just below the largest allowed
    power.
    """
    share, most = 1.0, Fraction(steps - widest, steps)
    while share > most:
        share *= _GOLDEN
    near = max(1, int(Fraction(share) * steps))
    candidates = [s for s in range(max(1, near - _CANDIDATES), near + 1) if math.gcd(s, steps) == 1]
    return min(candidates or [1], key=lambda s: sum(_partial_quotients(s, steps)))


def _partial_quotients(a: int, b: int) -> list[int]:
    """Returns the partial quotients of the continued fraction of a / b."""
    quotients = []
    while a:
        quotient, rest = divmod(b, a)
        quotients.append(quotient)
        a, b = rest, a
    return quotients


def _pattern(counts: list[int]) -> np.ndarray:
    """Returns int64[sum(counts)]: number k, counts[k] times, spread evenly."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    # Denominators are small: floats are equal if and only if the fractions are.
    places = np.concatenate([(2 * np.arange(count) + 1) / (2 * max(count, 1)) for count in counts])
    return numbers[np.argsort(places, kind="stable")]


def _hits(blocks: int, stride: int, steps: int, begin: int, width: int) -> int:
    """Returns the number of b < `blocks` with (b stride - begin) mod steps < width, for `width` <
    `steps`.
    """
    # floor(x / q) - floor((x - n) / q) is 1 if x mod q < n, else 0.
    return _floor_sum(blocks, steps, stride, -begin) - _floor_sum(
        blocks, steps, stride, -begin - width
    )


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Returns the sum of floor((a i + b) / m) over i = 0 .. n - 1, for m > 0, in O(log m) steps:
    Euclid's algorithm.

    Graham, Knuth and Patashnik, "Concrete Mathematics", section 3.5.
    """
    total = 0
    while n > 0:
        whole_a, a = divmod(a, m)
        whole_b, b = divmod(b, m)
        total += whole_a * (n * (n - 1) // 2) + whole_b * n
        # Each floor counts a column of points below a line of slope less than 1. Count rows of
        # points instead, from the top: they lie below a line of slope m / a.
        n, b = divmod(a * n + b, m)
        m, a = a, m
    return total


class MixtureStage(NamedTuple):
    """The weights from a position on."""

    start: int  # its first sample
    # of every source, 0 for one without samples in the stage; they add up to 1
    weights: tuple[Fraction, ...]


class StagedOrder:
    """The source of every sample of a mixture by stages, in closed form: O(log T) stages to find,
    any index alike.

    Stage t is the `WeightedOrder` of its weights, from its first sample on; counts per source
    continue from the previous stage. So within a stage every window of 1000 samples keeps the
    promise of `WeightedOrder`.
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
        # samples of each source before each stage
        self._before_TxK = [[0] * len(stages[0].weights)]
        for t in range(1, len(stages)):
            self._before_TxK.append(self._counts_in(t - 1, starts[t]))

    def __reduce__(self) -> tuple[type[StagedOrder], tuple[tuple[MixtureStage, ...]]]:
        return StagedOrder, (self.stages,)

    def at(self, indices: Sequence[int] | np.ndarray) -> Origins:
        """Returns the origins of the samples with these indices, each at least 0."""
        index_n = _numbers(indices)
        stage_n = np.array(
            [bisect_right(self._starts, index) - 1 for index in index_n.tolist()], np.int64
        )
        source_n, place_n = np.empty(len(index_n), np.int64), np.empty(len(index_n), index_n.dtype)
        for t in np.unique(stage_n).tolist():
            in_stage = stage_n == t
            source, place = self._orders[t].at(index_n[in_stage] - self._starts[t])
            source_n[in_stage] = np.array(self._active[t])[source]
            place_n[in_stage] = (
                np.array(self._before_TxK[t], index_n.dtype)[source_n[in_stage]] + place
            )
        return Origins(source_n, place_n)

    def counts(self, position: int) -> list[int]:
        """Returns the number of samples of each source among samples 0 to position - 1."""
        return self._counts_in(max(0, bisect_right(self._starts, position) - 1), position)

    def _counts_in(self, stage: int, position: int) -> list[int]:
        """Returns the counts at a position of this stage, its end included."""
        counts = list(self._before_TxK[stage])
        for k, count in zip(
            self._active[stage],
            self._orders[stage].counts(position - self._starts[stage]),
            strict=True,
        ):
            counts[k] += count
        return counts
