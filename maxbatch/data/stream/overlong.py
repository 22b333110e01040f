"""The key `overlong`: what becomes of records with answers that are longer than a row."""

from __future__ import annotations

import numpy as np

from maxbatch.system.errors import ConfigError


class OverlongError(ConfigError):
    """The refusal of a record that is longer than a row.

    Attributes:
      number: of the record among the kept ones of its dataset, from 0.
      kind: `conversation` or `pair`.
      problem: the message behind the name of the record.
    """

    def __init__(self, length: int, kind: str, number: int, problem: str) -> None:
        super().__init__(f"max_target_length={length}: {kind} {number + 1} {problem}")
        self.length, self.kind, self.number, self.problem = length, kind, number, problem

    def at(self, place: str) -> ConfigError:
        """Returns the error with the place of the record in its file."""
        return ConfigError(
            f"max_target_length={self.length}: the {self.kind} of {place} {self.problem}"
        )


def refuse_overlong(
    kind: str, numbers_S: np.ndarray, lengths_S: np.ndarray, length: int, overlong: str
) -> bool:
    """Returns whether those longer than `length` are to be left out (`overlong=drop`).

    Args:
      kind: `conversation` or `pair`, for messages.
      numbers_S: int64, their numbers from 0.
      lengths_S: int64, their tokens; of a pair, those of its longer answer with the prompt.

    Raises:
      OverlongError: one is longer, and `overlong` is `error`.
      ConfigError: `drop` leaves none.
    """
    is_long_S = lengths_S > length
    count = int(is_long_S.sum())
    works = f"works: max_target_length={int(lengths_S.max(initial=0))}, or overlong=truncate"
    if count and overlong == "error":
        first = int(np.argmax(is_long_S))
        more = f", and {count - 1} more are too long" if count > 1 else ""
        problem = f"has {int(lengths_S[first])} tokens{more}, and overlong=error; {works}"
        raise OverlongError(length, kind, int(numbers_S[first]), problem)
    if overlong == "drop" and count == len(lengths_S):
        raise ConfigError(
            f"overlong=drop: all {count} {kind}s are longer than max_target_length={length}; "
            f"{works}"
        )
    return overlong == "drop"
