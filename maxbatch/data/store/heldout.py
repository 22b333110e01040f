"""The split of records into training and held-out ones, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from maxbatch.system.errors import ConfigError


@dataclass(frozen=True)
class HeldOutFraction:
    """A share f of the records, evenly spread: record i is held out iff floor((i + 1) f) > floor(i
    f).
    """

    fraction: Fraction  # f, exact, 0 <= f < 1

    @classmethod
    def of(cls, eval_fraction: float) -> HeldOutFraction:
        """Returns the split by `eval_fraction`; 0.1 means one tenth."""
        return cls(Fraction(str(eval_fraction)))

    @property
    def rule(self) -> str:
        """The rule in words, for identities."""
        return f"fraction {self.fraction}" if self.fraction else "none"

    def refuse_empty(self, records: int, noun: str) -> None:
        """Raises ConfigError if the share is not 0 and yet holds out none of `records` records,
        named by `noun`.
        """
        if not self.fraction or self.count(records, held_out=True):
            return
        digits = 10 ** (len(str(records)) + 1)
        least = -(-digits // records) / digits
        raise ConfigError(
            f"eval_fraction={float(self.fraction)}: holds out none of {records} {noun}; "
            f"works: eval_fraction={least if records > 1 else 0}"
        )

    def count(self, records: int, held_out: bool) -> int:
        """Returns how many of the first `records` records are held out (or train)."""
        number = records * self.fraction.numerator // self.fraction.denominator
        return number if held_out else records - number

    def record(self, number: int, held_out: bool) -> int:
        """Returns the index of held-out (or training) record `number`, counted from 0. O(1)."""
        a, b = self.fraction.numerator, self.fraction.denominator
        # Held-out record n is the last of the first ceil((n + 1) / f) records. Training record n is
        # record floor(n / (1 - f)).
        return -(-(number + 1) * b // a) - 1 if held_out else number * b // (b - a)

    def records(self, count: int, held_out: bool, begin: int = 0) -> np.ndarray:
        """Returns the indices (int64) of `count` held-out (or training) records, from number
        `begin` on.
        """
        a, b = self.fraction.numerator, self.fraction.denominator
        if (begin + count + 1) * b >= 1 << 62:
            return np.array(
                [self.record(number, held_out) for number in range(begin, begin + count)], np.int64
            )
        numbers = np.arange(begin, begin + count, dtype=np.int64)
        return -(-(numbers + 1) * b // a) - 1 if held_out else numbers * b // (b - a)


@dataclass(frozen=True)
class Records:
    """The training (or held-out) records of the first `total`, by their indices in order, computed
    on demand.
    """

    split: HeldOutFraction
    total: int
    held_out: bool

    @property
    def are_all(self) -> bool:
        return len(self) == self.total

    def __len__(self) -> int:
        return self.split.count(self.total, self.held_out)

    @property
    def numbers_S(self) -> np.ndarray:
        """int64, the indices of all S of them."""
        return self.between(0, self.total)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Returns the indices (int64) of those from `begin` to before `end`."""
        first, last = (self.split.count(index, self.held_out) for index in (begin, end))
        return self.split.records(last - first, self.held_out, first)
