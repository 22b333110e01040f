"""The largest size that fits, with as few questions as possible: an answer costs a compilation. No JAX.

Sizes are numbered from 1 up; `rows_at(i)` is the micro-batch of size i, growing with i. The search ends when a size
fits and the next one does not. How it gets there depends on what a question costs:

- Where the compiler always works to its end (a CPU's, a GPU's), memory is taken to be a line in the rows, first an
  estimated one and then through the compiler's own figures, and the question is where that line meets the limit.
- The TPU compiler refuses within seconds what cannot fit and works for a minute on what can; close to the limit it
  saves memory only because it must, so that figures of what fits say little. The search then comes from above, from
  refusal to refusal by the bytes that each names, and asks as little as possible about what fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

_LINES = 5  # rounds after which the search halves what is left instead, should memory not be a line
_DESCENTS = (
    24  # the same, where a refusal is cheap: what is left is then quartered, for the sake of more refusals
)
_ABOVE = 4  # times the estimate: where a search from above begins
_FASTEST = 8  # of one question to the next, while nothing has failed yet
_MOST = 2**40  # sizes, where there is no end


class Answer(Protocol):
    """What the compiler says of a size."""

    @property
    def fits(self) -> bool: ...
    @property
    def needed_bytes(self) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes of a micro-batch: fixed + per_row x rows."""

    fixed: float
    per_row: float

    def rows_within(self, limit: float) -> float:
        """The rows at which the line meets a limit."""
        return max(0.0, limit - self.fixed) / max(self.per_row, 1.0)

    def through(self, points: list[tuple[int, int]], limit: float) -> Line:
        """The line through the two (rows, bytes) nearest to the limit; through one, with its own offset."""
        near = sorted(points, key=lambda point: abs(point[1] - limit))[:2]
        if len(near) == 2 and near[0][0] != near[1][0]:
            (rows, size), (other_rows, other_size) = near
            slope = (size - other_size) / (rows - other_rows)
            if slope > 0:
                return Line(size - slope * rows, slope)
        rows, size = near[0]
        return Line(min(self.fixed, size), max(size - self.fixed, 1.0) / rows)


@dataclasses.dataclass
class _Search:
    """What is known so far: `fits` is the largest size that fits, `fails` the smallest that does not, or no size."""

    rows_at: Callable[[int], int]
    limit: int
    line: Line
    fails: int
    fits: int = 0
    asked: int = 0
    stride: int = 1
    refused: tuple[int, int | None] | None = None  # rows of `fails`, and the bytes that they need
    points: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def along_the_line(self) -> int:
        """The next size to ask about, where every question costs the same."""
        if self.asked >= _LINES and self.refused:
            return (self.fits + self.fails) // 2
        guess = _last_within(self.rows_at, self.line.rows_within(self.limit), self.fails - 1)
        if self.refused:
            return max(guess, self.fits + 1)
        # A size that the line does not allow: where it was wrong before, in ever larger steps.
        beyond = guess < self.fits + self.stride
        guess = max(guess, self.fits + self.stride)
        self.stride = 2 * self.stride if beyond else 1
        return min(guess, self.fails - 1, _FASTEST * self.fits if self.fits else guess)

    def from_above(self) -> int:
        """The next size to ask about, where a refusal is cheap."""
        if not self.refused:
            rows = self.rows_at(self.fits) if self.fits else self.line.rows_within(self.limit)
            guess = _last_within(self.rows_at, _ABOVE * rows, self.fails - 1)
            return min(max(guess, self.fits + 1), self.fails - 1)
        rows, size = self.refused
        nearer_to_refusal = self.fails - max(1, (self.fails - self.fits) // 4)
        if self.asked >= _DESCENTS or size is None:
            return nearer_to_refusal
        # Where memory is a line, the bytes that every batch needs make its limit lie below this proportion.
        guess = _last_within(self.rows_at, rows * self.limit / size, self.fails - 1)
        return guess if guess > self.fits else nearer_to_refusal

    def learn(self, size: int, answer: Answer) -> None:
        """Takes an answer in."""
        rows = self.rows_at(size)
        if not answer.fits and size < self.fails:
            self.fails, self.refused = size, (rows, answer.needed_bytes)
        elif answer.fits and size < self.fails:
            self.fits = max(self.fits, size)
        if answer.needed_bytes is not None:
            self.points.append((rows, answer.needed_bytes))
            self.line = self.line.through(self.points, self.limit)


def largest_fitting(
    rows_at: Callable[[int], int],
    count: int | None,
    limit: int,
    line: Line,
    ask: Callable[[Sequence[int]], Sequence[Answer]],
    at_once: int = 1,
    refusals_are_cheap: bool = False,
) -> int:
    """Return the largest size that fits; 0 where not even the first does.

    Args:
      rows_at: rows of the micro-batch of a size.
      count: sizes that there are; None: no end.
      limit: bytes that there are.
      line: an estimate of memory.
      ask: the verdicts on numbers of rows, found side by side.
      at_once: how many numbers to ask about at a time: with a size the next ones, which are needed if it fits.
      refusals_are_cheap: whether to come from above.
    """
    search = _Search(rows_at, limit, line, fails=_MOST if count is None else count + 1)
    while search.fails - search.fits > 1:
        guess = search.from_above() if refusals_are_cheap else search.along_the_line()
        sizes = range(guess, min(guess + at_once, search.fails))
        search.asked += 1
        for size, answer in zip(sizes, ask([rows_at(size) for size in sizes]), strict=True):
            search.learn(size, answer)
    return search.fits


def _last_within(rows_at: Callable[[int], int], rows: float, most: int) -> int:
    """Return the last size, up to `most`, whose rows are within a number; 0 where none is."""
    low, high = 0, 1
    while high <= most and rows_at(high) <= rows:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if rows_at(middle) <= rows:
            low = middle
        else:
            high = middle
    return low
