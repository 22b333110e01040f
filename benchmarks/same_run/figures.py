"""What two runs of the same training have in common: figures per update, and what the updates
changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]
ROUNDING = 1e-6  # of the gradients' size: float32 resolves sums of a thousand such terms no better


class Update(NamedTuple):
    """The figures of an update."""

    loss: float
    grad_norm: float
    rate: float


@dataclass(frozen=True)
class Tolerances:
    """The largest differences of the same run.

    Attributes:
      loss: of losses, relative.
      grad_norm: of gradient norms, relative.
      rate: of rates, over the highest of the run.
      array: ‖ours − theirs‖ / ‖theirs − start‖ of a parameter array.
    """

    loss: float = 1e-4
    grad_norm: float = 1e-3
    rate: float = 1e-6
    array: float = 1e-3


@dataclass(frozen=True)
class Differences:
    """Largest differences of two runs, by the names of `Tolerances`.

    Attributes:
      arrays: the ratio of every parameter array.
      left_out: entries whose gradient was rounding alone.
    """

    loss: float
    grad_norm: float
    rate: float
    arrays: Mapping[str, float]
    left_out: int

    @property
    def array(self) -> float:
        return max(self.arrays.values())

    def beyond(self, tolerances: Tolerances) -> list[str]:
        """Returns the names of the figures that are larger than their tolerance."""
        return [
            name
            for name in vars(tolerances)
            if not getattr(self, name) <= getattr(tolerances, name)
        ]


def differences(
    ours: Sequence[Update],
    theirs: Sequence[Update],
    start: Arrays,
    our_end: Arrays,
    their_end: Arrays,
    squares: Arrays | None,
) -> Differences:
    """Compares two runs, and their updates as far as both go.

    Args:
      squares: Adam's second moments of their run; where their root is within rounding of zero, an
        entry is left out.
    """
    peak = max(update.rate for update in theirs)
    arrays, left_out = {}, 0
    typical = np.sqrt(np.mean([np.mean(square) for square in squares.values()])) if squares else 0.0
    for name, begun in start.items():
        counted = np.ones(begun.shape, bool)
        if squares:
            gradient = np.sqrt(squares[name])
            counted = ~((gradient > 0) & (gradient < ROUNDING * typical))
            left_out += int(np.sum(~counted))
        difference = _norm((our_end[name] - their_end[name])[counted])
        changed = _norm((their_end[name] - begun)[counted])
        arrays[name] = difference / changed if changed else (np.inf if difference else 0.0)
    return Differences(
        max(abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(ours, theirs, strict=False)),
        max(
            abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in zip(ours, theirs, strict=False)
        ),
        max(abs(a.rate - b.rate) for a, b in zip(ours, theirs, strict=False)) / peak,
        arrays,
        left_out,
    )


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(values.astype(np.float64)))))
