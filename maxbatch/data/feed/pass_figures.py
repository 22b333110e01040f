"""The passes that an update is likely to take, from a sample of lengths or a mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxbatch.data.feed.passes import Passes

_MOST_SAMPLES = 1 << 17  # that are packed for a plan
_UPDATES = 8


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
      lengths: tokens of samples in a random order, at least one; those of an update are drawn from
        them in turn.
      row_length: L.
      rows_per_device: rows of a device in one pass.
    """
    updates = max(1, len(lengths) // batch)
    packings = [
        Passes.of(np.resize(lengths[first:], batch), row_length, 1)
        for first in range(0, updates * batch, batch)
    ]
    tokens = np.array([packing.num_tokens for packing in packings])
    rows = np.array([packing.num_rows for packing in packings])

    def share(rows_of_device: int) -> float:
        in_pass = rows_of_device * num_devices
        return float(tokens.sum() / (-(-rows // in_pass) * in_pass * row_length).sum())

    tried = range(rows_per_device, (rows_per_device + 1) // 2 - 1, -1)
    best = max(tried, key=share)  # the largest of equals
    passes = -(-rows // (rows_per_device * num_devices))
    return PassFigures(
        float(passes.mean()),
        float(tokens.sum() / (rows.sum() * row_length)),
        share(rows_per_device),
        best * row_length,
        share(best),
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
