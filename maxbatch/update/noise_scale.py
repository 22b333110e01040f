"""The gradient noise scale: the batch size worth having, from gradients that accumulation computes
anyway.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
(https://arxiv.org/abs/1812.06162), appendix A.1. Let G be the true gradient of the mean loss and V
the trace of the covariance of one unit of loss weight. A part of the batch with weight w has a
summed gradient g with E|g|^2 = w^2 |G|^2 + w V, and so has the whole batch, of weight W. From the
parts of a small batch, with Q = sum of |g|^2, u = sum of w and q = sum of w^2, and from the whole
batch, with T = |sum of g|^2, both follow without bias:

    |G|^2 = (T / W - Q / u) / (W - q / u)        V = Q / u - |G|^2 q / u

Each is noisy, and |G|^2 can come out negative, so both are averaged over updates before they are
divided.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DECAY = 0.99  # of the averages, per update: about the last hundred updates count


class NoiseScale(NamedTuple):
    """Exponential averages over the updates so far; plain floats, kept in the checkpoint."""

    trace: float = 0.0  # average of V times the rows per unit of weight: the trace for one sample
    square: float = 0.0  # average of |G|^2
    # sum of the averages' weights, 1 - DECAY^updates; 0 before the first measurement
    mass: float = 0.0

    def after(
        self,
        grad_norm: float,
        weight: float,
        num_rows: int,
        part_gradient_squares: float,
        part_weights: float,
        part_weight_squares: float,
    ) -> NoiseScale:
        """Returns the averages with one more update; unchanged for an update of one part, or one
        that is not finite.

        Args:
          grad_norm: global norm of the mean gradient, before clipping.
          weight: W, the batch's loss weight.
          num_rows: samples in the batch.
          part_gradient_squares: Q, sum over the measured parts of the squared norm of their summed
            gradients.
          part_weights: u, sum over these parts of their loss weight; 0 where nothing was measured.
          part_weight_squares: q, sum over these parts of their squared weight.
        """
        part = part_weight_squares / part_weights if part_weights > 0 else 0.0
        is_part = 0 < part < (1 - 1e-6) * weight
        if not (is_part and math.isfinite(grad_norm) and math.isfinite(part_gradient_squares)):
            return self
        square_per_weight = part_gradient_squares / part_weights
        square = (grad_norm**2 * weight - square_per_weight) / (weight - part)
        trace = (square_per_weight - square * part) * num_rows / weight
        return NoiseScale(
            DECAY * self.trace + (1 - DECAY) * trace,
            DECAY * self.square + (1 - DECAY) * square,
            DECAY * self.mass + (1 - DECAY),
        )

    @property
    def samples(self) -> float | None:
        """The noise scale V / |G|^2 in samples; None while the averages give none."""
        return (
            self.trace / self.square if self.mass and self.square > 0 and self.trace > 0 else None
        )
