"""How many tokens of conversations are trained on: of a split, of a mixture's sources, and of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class TrainedTokens(NamedTuple):
    """The trained tokens of a split's rows, each row once."""

    num_rows: int
    total: int
    square_sum: int  # of each row's number

    @property
    def mean(self) -> float:
        """The mean of a row."""
        return self.total / self.num_rows

    @property
    def std(self) -> float:
        """The standard deviation of a row."""
        return math.sqrt(max(0.0, self.square_sum / self.num_rows - self.mean**2))


class TrainedShare(NamedTuple):
    """One source's share of a stream of conversations."""

    weight: float  # of the samples; 1 if it is the only source
    tokens: TrainedTokens


def trained_tokens_of_update(shares: Sequence[TrainedShare], batch_size: int) -> dict[str, float]:
    """Returns the `mean` and the standard deviation (`std`) of the trained tokens in an update of B shuffled rows.

    The rows of a source are drawn from its epoch without replacement (Cochran 1977, Sampling Techniques, theorem 2.2);
    an update that is longer than an epoch holds all of its rows.
    """
    mean = variance = 0.0
    for weight, tokens in shares:
        rows, drawn = tokens.num_rows, batch_size * weight
        mean += drawn * tokens.mean
        drawn %= rows
        variance += tokens.std**2 * drawn * (rows - drawn) / max(rows - 1, 1)
    return {"mean": mean, "std": math.sqrt(variance)}


class ConversationFigures(NamedTuple):
    """Figures of the conversations of a split."""

    num_overlong: int  # longer than a row
    tokens: TrainedTokens
