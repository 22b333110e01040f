"""The search for the largest size that fits, with few compilations. No JAX.

Sizes are numbered from 1; `rows[i - 1]` is the micro-batch of size i and grows with i. The search
ends when a size fits and the next one does not. Its method depends on the cost of a compilation:

- The compilers of CPUs and GPUs always finish. The search assumes that memory is linear in the rows, first by an
  estimate, then by the compiler's own figures, and asks for the size at which the line meets the
  limit.
- The TPU compiler refuses within seconds a program that cannot fit, and compiles for a minute one that does. Close to
  the limit it saves memory, so the figures of programs that fit predict little. The search starts
  above the limit, goes from refusal to refusal by the bytes that each names, and compiles few sizes
  that fit.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxbatch.run.compile.memory import Verdict

_LINES = 5  # rounds after which the search bisects, in case memory is not a line
# the same from above; then it quarters the rest from its upper end, to get more refusals
_DESCENTS = 24
_ABOVE = 4  # a search from above begins at this multiple of the estimate
_FASTEST = 8  # most growth from one question to the next while nothing has failed


@dataclasses.dataclass(frozen=True)
class Line:
    """The memory of a micro-batch in bytes: fixed + per_row x rows."""

    fixed: float
    per_row: float

    def rows_within(self, limit: float) -> float:
        """Returns the rows at which the line meets a limit."""
        return max(0.0, limit - self.fixed) / max(self.per_row, 1.0)

    def through(self, points: list[tuple[int, int]], limit: float) -> Line:
        """Returns the line through the two (rows, bytes) nearest to the limit, or through one with
        the same offset.
        """
        (rows, size), *others = sorted(points, key=lambda point: abs(point[1] - limit))[:2]
        for other_rows, other_size in others:
            if other_rows != rows and (slope := (size - other_size) / (rows - other_rows)) > 0:
                return Line(size - slope * rows, slope)
        return Line(min(self.fixed, size), max(size - self.fixed, 1.0) / rows)


@dataclasses.dataclass
class _Search:
    rows: Sequence[int]
    limit: int
    line: Line
    fails: int  # the smallest size known not to fit, or one past the last size
    fits: int = 0  # the largest size known to fit, or 0
    asked: int = 0
    stride: int = 1
    refused: tuple[int, int | None] | None = None  # rows of `fails`, and the bytes that they need
    points: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def along_the_line(self) -> int:
        """Returns the next size to compile if every compilation costs the same."""
        if self.asked >= _LINES and self.refused:
            return (self.fits + self.fails) // 2
        guess = self._last_within(self.line.rows_within(self.limit))
        if self.refused:
            return max(guess, self.fits + 1)
        # Beyond the line, which was wrong before, the steps grow.
        beyond = guess < self.fits + self.stride
        guess = max(guess, self.fits + self.stride)
        self.stride = 2 * self.stride if beyond else 1
        return min(guess, self.fails - 1, _FASTEST * self.fits if self.fits else guess)

    def from_above(self) -> int:
        """Returns the next size to compile if refusals are cheap."""
        if not self.refused:
            rows = self.rows[self.fits - 1] if self.fits else self.line.rows_within(self.limit)
            guess = self._last_within(_ABOVE * rows)
            return min(max(guess, self.fits + 1), self.fails - 1)
        rows, size = self.refused
        nearer_to_refusal = self.fails - max(1, (self.fails - self.fits) // 4)
        if self.asked >= _DESCENTS or size is None:
            return nearer_to_refusal
        # If memory is a line with an offset, the limit is below this proportion.
        guess = self._last_within(rows * self.limit / size)
        return guess if guess > self.fits else nearer_to_refusal

    def _last_within(self, rows: float) -> int:
        """Returns the last size that may fit and has at most `rows`; 0 if there is none."""
        return bisect.bisect_right(self.rows, rows, hi=self.fails - 1)

    def learn(self, size: int, answer: Verdict) -> None:
        rows = self.rows[size - 1]
        if not answer.fits and size < self.fails:
            self.fails, self.refused = size, (rows, answer.needed_bytes)
        elif answer.fits and size < self.fails:
            self.fits = max(self.fits, size)
        if answer.needed_bytes is not None:
            self.points.append((rows, answer.needed_bytes))
            self.line = self.line.through(self.points, self.limit)


def largest_fitting(
    rows: Sequence[int],
    limit: int,
    line: Line,
    ask: Callable[[Sequence[int]], Sequence[Verdict]],
    at_once: int = 1,
    refusals_are_cheap: bool = False,
) -> int:
    """Returns the largest size that fits a device of `limit` bytes; 0 if none does.

    Args:
      line: an estimate of memory.
      ask: returns the verdicts on numbers of rows, found side by side.
      at_once: sizes in one request: a guess and the next ones, which are needed if the guess fits.
      refusals_are_cheap: whether to search from above.
    """
    search = _Search(rows, limit, line, fails=len(rows) + 1)
    while search.fails - search.fits > 1:
        guess = search.from_above() if refusals_are_cheap else search.along_the_line()
        sizes = range(guess, min(guess + at_once, search.fails))
        search.asked += 1
        answers = ask([rows[size - 1] for size in sizes])
        for size, answer in zip(sizes, answers, strict=True):
            search.learn(size, answer)
    return search.fits
