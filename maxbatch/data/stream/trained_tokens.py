"""Numbers of trained tokens where others are not: per split, per source of a mixture, and per
update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class TrainedTokens(NamedTuple):
    """The trained tokens of a split's rows, each row once."""

    num_rows: int
    total: int
    square_sum: int  # sum of each row's squared number

    @property
    def mean(self) -> float:
        return self.total / self.num_rows

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.square_sum / self.num_rows - self.mean**2))


class TrainedShare(NamedTuple):
    """One source's share of a stream."""

    weight: float  # share of the samples; 1 for a single source
    tokens: TrainedTokens


def trained_tokens_of_update(shares: Sequence[TrainedShare], batch_size: int) -> dict[str, float]:
    """Returns `mean` and standard deviation (`std`) of the trained tokens in an update of B
    shuffled rows.

    The rows of a source are drawn from its epoch without replacement (Cochran 1977, Sampling
    Techniques, theorem 2.2); an update longer than an epoch has all of its rows.
    """
    mean = variance = 0.0
    for weight, tokens in shares:
        rows, drawn = tokens.num_rows, batch_size * weight
        mean += drawn * tokens.mean
        drawn %= rows
        variance += tokens.std**2 * drawn * (rows - drawn) / max(rows - 1, 1)
    return {"mean": mean, "std": math.sqrt(variance)}


class TrainedFigures(NamedTuple):
    """Figures of a split whose records say which tokens are trained on."""

    num_overlong: int  # longer than a row
    tokens: TrainedTokens
