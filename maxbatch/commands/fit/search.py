"""The search for the largest size that fits, with few questions, because each one costs a compilation. No JAX.

Sizes are numbered from 1; `rows_at(i)` is the micro-batch of size i and grows with i. The search ends when a size fits
and the next one does not. The way there depends on what a question costs:

- The compilers of CPUs and GPUs always work to the end. The search takes memory for a line in the rows, first an
  estimated one, then through the compiler's own figures, and asks where the line meets the limit.
- The TPU compiler refuses within seconds what cannot fit and works for a minute on what can. Close to the limit it
  saves memory because it must, so the figures of what fits say little. The search comes from above, from refusal to
  refusal by the bytes that each names, and asks little about sizes that fit.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

_LINES = 5  # rounds after which the search bisects, in case memory is not a line
_DESCENTS = 24  # the same from above; what is left is then quartered from its upper end, for more refusals
_ABOVE = 4  # a search from above begins at this multiple of the estimate
_FASTEST = 8  # most growth from one question to the next while nothing has failed


class Answer(Protocol):
    """The compiler's verdict on a size."""

    @property
    def fits(self) -> bool: ...
    @property
    def needed_bytes(self) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class Line:
    """The memory of a micro-batch in bytes: fixed + per_row x rows."""

    fixed: float
    per_row: float

    def rows_within(self, limit: float) -> float:
        """Returns the rows at which the line meets a limit."""
        return max(0.0, limit - self.fixed) / max(self.per_row, 1.0)

    def through(self, points: list[tuple[int, int]], limit: float) -> Line:
        """Returns the line through the two (rows, bytes) nearest to the limit, or through one with the same offset."""
        near = sorted(points, key=lambda point: abs(point[1] - limit))[:2]
        if len(near) == 2 and near[0][0] != near[1][0]:
            (rows, size), (other_rows, other_size) = near
            slope = (size - other_size) / (rows - other_rows)
            if slope > 0:
                return Line(size - slope * rows, slope)
        rows, size = near[0]
        return Line(min(self.fixed, size), max(size - self.fixed, 1.0) / rows)


@dataclasses.dataclass(frozen=True)
class Questions:
    """The way to ask the compiler.

    Attributes:
      ask: returns the verdicts on numbers of rows, found side by side.
      at_once: sizes in one question: a guess and those after it, which are needed if it fits.
      refusals_are_cheap: whether to come from above.
    """

    ask: Callable[[Sequence[int]], Sequence[Answer]]
    at_once: int = 1
    refusals_are_cheap: bool = False


@dataclasses.dataclass
class _Search:
    """The state of a search.

    Attributes:
      fails: the smallest size known not to fit, or one past the last size.
      fits: the largest size known to fit, or 0.
      refused: rows of `fails`, and the bytes that they need.
    """

    rows_at: Callable[[int], int]
    limit: int
    line: Line
    fails: int
    fits: int = 0
    asked: int = 0
    stride: int = 1
    refused: tuple[int, int | None] | None = None
    points: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def along_the_line(self) -> int:
        """Returns the next size to ask about if every question costs the same."""
        if self.asked >= _LINES and self.refused:
            return (self.fits + self.fails) // 2
        guess = _last_within(self.rows_at, self.line.rows_within(self.limit), self.fails - 1)
        if self.refused:
            return max(guess, self.fits + 1)
        # Past the line, which was wrong before, the steps grow.
        beyond = guess < self.fits + self.stride
        guess = max(guess, self.fits + self.stride)
        self.stride = 2 * self.stride if beyond else 1
        return min(guess, self.fails - 1, _FASTEST * self.fits if self.fits else guess)

    def from_above(self) -> int:
        """Returns the next size to ask about if refusals are cheap."""
        if not self.refused:
            rows = self.rows_at(self.fits) if self.fits else self.line.rows_within(self.limit)
            guess = _last_within(self.rows_at, _ABOVE * rows, self.fails - 1)
            return min(max(guess, self.fits + 1), self.fails - 1)
        rows, size = self.refused
        nearer_to_refusal = self.fails - max(1, (self.fails - self.fits) // 4)
        if self.asked >= _DESCENTS or size is None:
            return nearer_to_refusal
        # If memory is a line with an offset, the limit lies below this proportion.
        guess = _last_within(self.rows_at, rows * self.limit / size, self.fails - 1)
        return guess if guess > self.fits else nearer_to_refusal

    def learn(self, size: int, answer: Answer) -> None:
        """Records an answer."""
        rows = self.rows_at(size)
        if not answer.fits and size < self.fails:
            self.fails, self.refused = size, (rows, answer.needed_bytes)
        elif answer.fits and size < self.fails:
            self.fits = max(self.fits, size)
        if answer.needed_bytes is not None:
            self.points.append((rows, answer.needed_bytes))
            self.line = self.line.through(self.points, self.limit)


def largest_fitting(
    rows_at: Callable[[int], int], count: int, limit: int, line: Line, questions: Questions
) -> int:
    """Returns the largest size that fits; 0 if not even the first does.

    Args:
      rows_at: rows of the micro-batch of a size.
      count: number of sizes.
      limit: bytes of a device.
      line: an estimate of memory.
      questions: how the compiler is asked.
    """
    search = _Search(rows_at, limit, line, fails=count + 1)
    while search.fails - search.fits > 1:
        guess = search.from_above() if questions.refusals_are_cheap else search.along_the_line()
        sizes = range(guess, min(guess + questions.at_once, search.fails))
        search.asked += 1
        answers = questions.ask([rows_at(size) for size in sizes])
        for size, answer in zip(sizes, answers, strict=True):
            search.learn(size, answer)
    return search.fits


def _last_within(rows_at: Callable[[int], int], rows: float, most: int) -> int:
    """Returns the last size, up to `most`, whose rows are at most `rows`; 0 if there is none."""
    return bisect.bisect_right(range(1, most + 1), rows, key=rows_at)
