"""Holes in a stream: ranges of its own numbers that are left out (`skip_samples`).

The own number of a sample is its place in the stream without holes: it depends on the data alone.
What is left is the stream that training reads, so `samples_seen`, batches, stages and rates count
kept samples only; a length in epochs is the one number of a plan that needs the holes.

Every method takes O(log K) for K holes, unless it returns holes.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from maxbatch.config.values import shown

if TYPE_CHECKING:
    import numpy as np

SKIP_SAMPLES = "skip_samples"
LARGEST = 2**63 - 1  # own number that a hole may end with


class Hole(NamedTuple):
    """A range of own numbers."""

    first: int
    end: int  # the first one behind it


class Holes:
    """Sorted ranges of own numbers that neither touch nor overlap.

    Args:
      ranges: any ranges that are not empty, in any order; those that touch or overlap are merged.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = list(ranges)
        if pairs:
            import numpy as np  # late: a plan without holes does not import it

            first_n, end_n = np.array(pairs, np.int64).T
            self._take(first_n, end_n)
        else:
            self._firsts, self._ends, self._kept = array("q"), array("q"), array("q")

    @classmethod
    def of_arrays(cls, first_n: np.ndarray, end_n: np.ndarray) -> Holes:
        """Returns the holes of many ranges, int64 arrays of at least one element."""
        holes = cls()
        holes._take(first_n, end_n)
        return holes

    def _take(self, first_n: np.ndarray, end_n: np.ndarray) -> None:
        import numpy as np

        if (first_n[1:] < first_n[:-1]).any():
            order = np.argsort(first_n, kind="stable")
            first_n, end_n = first_n[order], end_n[order]
        end_n = np.maximum.accumulate(end_n)
        begins = np.concatenate([[True], first_n[1:] > end_n[:-1]])
        first_K = first_n[begins]
        end_K = end_n[np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(end_n) - 1]])]
        size_K = end_K - first_K
        kept_K = first_K - (np.cumsum(size_K) - size_K)  # kept samples before each hole
        self._firsts, self._ends, self._kept = (
            array("q", column.astype(np.int64).tobytes()) for column in (first_K, end_K, kept_K)
        )

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[Hole]:
        return map(Hole, self._firsts, self._ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Holes):
            return NotImplemented
        return self._firsts == other._firsts and self._ends == other._ends

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Holes({shown(self.text)})"

    def __contains__(self, number: int) -> bool:
        hole = bisect_right(self._firsts, number) - 1
        return hole >= 0 and number < self._ends[hole]

    def own_number(self, n: int) -> int:
        """Returns the own number of the n-th kept sample, counted from 0."""
        holes_before = bisect_right(self._kept, n)
        if not holes_before:
            return n
        return n + self._ends[holes_before - 1] - self._kept[holes_before - 1]

    def own_numbers(self, indices: Sequence[int] | np.ndarray) -> list[int]:
        """Returns the own numbers of kept samples."""
        return [self.own_number(int(n)) for n in indices]

    def kept_before(self, number: int) -> int:
        """Returns the number of kept samples below an own number."""
        hole = bisect_right(self._firsts, number) - 1
        if hole < 0:
            return number
        return self._kept[hole] + max(0, number - self._ends[hole])

    def position_after(self, samples_seen: int) -> int:
        """Returns the stream position: one more than the own number of the last of the first
        `samples_seen` kept samples, 0 before the first.
        """
        return self.own_number(samples_seen - 1) + 1 if samples_seen else 0

    def count_before(self, number: int) -> int:
        """Returns the number of holes that begin below an own number."""
        return bisect_left(self._firsts, number)

    def before(self, number: int) -> Holes:
        """Returns the holes, and the parts of holes, below an own number."""
        holes, count = Holes(), self.count_before(number)
        holes._firsts, holes._kept = self._firsts[:count], self._kept[:count]
        holes._ends = self._ends[:count]
        if count:
            holes._ends[-1] = min(holes._ends[-1], number)
        return holes

    def ahead_of(self, number: int) -> Holes:
        """Returns the holes, and the parts of holes, from an own number on."""
        return Holes(
            (max(first, number), end) for first, end in self.overlapping(number, LARGEST + 1)
        )

    def overlapping(self, first: int, end: int) -> Iterator[Hole]:
        """Yields the holes with own numbers among `first` to `end` - 1, each as a whole."""
        begin, stop = bisect_right(self._ends, first), bisect_left(self._firsts, end)
        return map(Hole, self._firsts[begin:stop], self._ends[begin:stop])

    def merged_with(self, other: Holes) -> Holes:
        """Returns the holes that leave out what either leaves out."""
        return Holes([*self, *other])

    @property
    def text(self) -> str:
        """The holes as `skip_samples` states them."""
        return " ".join(f"{first}:{end}" for first, end in self)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the holes; "" if there are none."""
        if not self:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for column in (self._firsts, self._ends):
            digest.update(column.tobytes())
        return digest.hexdigest()

    @property
    def identity(self) -> dict[str, str | int | bool]:
        """What the holes add to the identity of a stream; nothing if there are none."""
        return {SKIP_SAMPLES: self.digest} if self else {}


NO_HOLES = Holes()
