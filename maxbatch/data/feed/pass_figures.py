"""The passes that an update is likely to take, from a sample of lengths or a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.data.feed.passes import Passes

_MOST_SAMPLES = 1 << 14  # that are packed for a plan
_UPDATES = 4
_MOST_TRIED = 16  # budgets


class PassFigures(NamedTuple):
    """The passes of an update whose samples share rows: means over sampled updates."""

    num_passes: float
    row_share: float  # tokens over slots of the rows that hold any
    slot_share: float  # tokens over slots of all passes
    # the budget, from half of the stated one to it, whose passes waste the least, and its share
    best_max_tokens_per_pass: int
    best_slot_share: float

    def in_words(self) -> str:
        return (
            f"passes by tokens: {self.num_passes:,.1f} per update; tokens fill {self.row_share:.1%} "
            f"of their rows and {self.slot_share:.1%} of all passes; from half of it up, "
            f"max_tokens_per_pass={self.best_max_tokens_per_pass} fills the most, "
            f"{self.best_slot_share:.1%}"
        )


def num_lengths(batch: int) -> int:
    """Returns the number of samples from which a batch's figures are taken."""
    return min(_UPDATES * batch, max(batch, _MOST_SAMPLES))


def pass_figures(
    lengths: np.ndarray, batch: int, row_length: int, rows_per_device: int, num_devices: int
) -> PassFigures:
    """Returns the figures of updates of `batch` samples.

    Args:
      lengths: tokens of samples in a random order, at least one, as `Passes.of` takes them; those of
        an update are drawn from them in turn.
      row_length: L.
      rows_per_device: rows of a device in one pass.
    """
    updates = [
        np.take(lengths, np.arange(first, first + batch), axis=0, mode="wrap")
        for first in range(0, max(1, len(lengths) // batch) * batch, batch)
    ]
    tokens = sum(int(of_update.sum()) for of_update in updates)

    def packings(rows: int) -> list[Passes]:
        return [Passes.of(of_update, row_length, rows * num_devices) for of_update in updates]

    def again(rows: int) -> list[Passes]:
        """Returns the passes of another size; rows of samples of one row do not depend on it."""
        if stated[0].rows_per_sample > 1:
            return packings(rows)
        return [packing._replace(rows_per_pass=rows * num_devices) for packing in stated]

    def share(packed: Sequence[Passes]) -> float:
        slots = sum(p.num_passes * p.rows_per_pass for p in packed) * row_length
        return tokens / slots

    stated = packings(rows_per_device)
    least = max((rows_per_device + 1) // 2, -(-stated[0].rows_per_sample // num_devices))
    step = max(1, (rows_per_device - least) // _MOST_TRIED)
    tried = {rows: share(again(rows)) for rows in range(rows_per_device, least - 1, -step)}
    best = max(tried, key=tried.__getitem__)  # the largest of equals
    return PassFigures(
        sum(p.num_passes for p in stated) / len(stated),
        sum(p.row_share or 0 for p in stated) / len(stated),
        share(stated),
        best * row_length,
        tried[best],
    )


def lengths_of_mean(mean: float, row_length: int, count: int) -> np.ndarray:
    """Returns log-normal lengths (sigma 1) of 1 to L tokens with this mean, in a random order."""
    draws = np.random.default_rng(0).lognormal(0, 1, count)

    def lengths(scale: float) -> np.ndarray:
        return np.clip(np.rint(scale * draws), 1, row_length).astype(np.int64)

    low, high = 0.0, float(row_length) * 100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    return lengths(high)
