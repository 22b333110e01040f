"""The key `overlong`: what becomes of conversations and pairs that are longer than a row."""

from __future__ import annotations

import numpy as np

from maxbatch.system.errors import ConfigError


def refuse_overlong(kind: str, numbers_S: np.ndarray, lengths_S: np.ndarray, length: int, overlong: str) -> bool:
    """Returns whether those longer than `length` are to be left out (`overlong=drop`).

    Args:
      kind: `conversation` or `pair`, for messages.
      numbers_S: int64, their numbers from 0.
      lengths_S: int64, their tokens; of a pair, those of its longer answer with the prompt.

    Raises:
      ConfigError: one is longer, and `overlong` is `error`; or `drop` leaves none.
    """
    is_long_S = lengths_S > length
    count = int(is_long_S.sum())
    works = f"works: max_target_length={int(lengths_S.max(initial=0))}, or overlong=truncate"
    if count and overlong == "error":
        first = int(np.argmax(is_long_S))
        more = f", and {count - 1} more are too long" if count > 1 else ""
        raise ConfigError(
            f"max_target_length={length}: {kind} {int(numbers_S[first]) + 1} has {int(lengths_S[first])} tokens{more}, "
            f"and overlong=error; {works}"
        )
    if overlong == "drop" and count == len(lengths_S):
        raise ConfigError(f"overlong=drop: all {count} {kind}s are longer than max_target_length={length}; {works}")
    return overlong == "drop"
