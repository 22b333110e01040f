"""How far two runs are apart, and how far rounding alone takes them.

The distance of two arrays is the median of the differences of their elements that moved, over the root mean square of
the movement of all parameters. So an element whose gradient is zero in exact arithmetic, which Adam turns from rounding
noise into a whole step, does not count unless most of its array is so; and then the array differs as much between
permutations of the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.auditing.trainer import Run

LEAST = 1e-5  # of the movement, of the loss: no trainer is held to less
TIMES = 10.0  # the spread over permutations
_MOST = 0.02  # rounding that changes more than this is no rounding
# The same of the first loss, of which only the order of a sum differs; the second, if it is reported in bfloat16.
_MOST_FIRST, _MOST_FIRST_COARSE = 2.0**-10, 2.0**-7
_COARSE = 8  # bits of a number in bfloat16


class Tolerance(NamedTuple):
    """How far rounding may take two runs apart."""

    params: Mapping[str, float] = {}  # spread of each array over permutations of the rows, of the movement
    loss: float = 0.0  # spread, of the loss

    def of_array(self, name: str) -> float:
        """Returns the most that an array may differ by, of the movement."""
        return LEAST + TIMES * self.params.get(name, 0.0)

    @property
    def spread(self) -> float:
        """The median of the spreads of the arrays."""
        return float(np.median([*self.params.values()] or [0.0]))

    @property
    def of_loss(self) -> float:
        """The most that a loss may differ by, of itself."""
        return LEAST + TIMES * self.loss


class Difference(NamedTuple):
    """Two runs that differ by more than rounding."""

    update: int  # the first after which they do, from 1
    array: str | None  # the one that differs most; None: all parameters agree
    by: float  # its distance, of the movement; or of the loss, of itself
    loss_by: float  # distance of the losses; 0 where they agree


def tolerance(base: Run, permuted: Sequence[Run]) -> tuple[Tolerance, float]:
    """Returns the spread over permutations of the same rows, and the distance that no rounding explains, or 0."""
    spread = {
        name: max(_distance(base, run, t, name) for run in permuted for t in _updates(base)) for name in _of(base)
    }
    pooled = max(_distance(base, run, t) for run in permuted for t in _updates(base))
    gaps = [_loss_gaps(base, run) for run in permuted]
    loss = max((gap for of_run in gaps for gap in of_run), default=0.0)
    first = max((gap for of_run in gaps for gap in of_run[:1]), default=0.0)
    most_first = _MOST_FIRST_COARSE if all(map(_is_coarse, base.losses)) else _MOST_FIRST
    found = ((pooled, _MOST), (loss, _MOST), (first, most_first))
    if worst := max((x for x, most in found if not x <= most), default=0.0):
        return Tolerance(), worst
    return Tolerance(spread, loss), 0.0


def difference(base: Run, other: Run, within: Tolerance) -> Difference | None:
    """Returns where two runs differ by more than rounding, or None."""
    gaps = {
        (t, name): gap
        for t in _updates(base)
        for name in _of(base)
        if not (gap := _distance(base, other, t, name)) <= within.of_array(name) + _ulps(base, t, name)
    }
    losses = {t: gap for t, gap in enumerate(_loss_gaps(base, other), 1) if not gap <= within.of_loss}
    if not gaps and not losses:
        return None
    array = max(gaps, key=lambda place: gaps[place])[1] if gaps else None
    loss_by = max(losses.values(), default=0.0)
    return Difference(min([t for t, _ in gaps] + [*losses]), array, max(gaps.values(), default=loss_by), loss_by)


def is_same(a: Run, b: Run) -> tuple[bool, bool]:
    """Returns whether the parameters of two runs are equal, bit for bit, and whether their losses are."""
    params = all(np.array_equal(a.params[-1][name], b.params[-1][name], equal_nan=True) for name in _of(a))
    return params, bool(a.losses) and np.array_equal(a.losses, b.losses, equal_nan=True)


def moved(run: Run) -> bool:
    """Returns whether any parameter changes over the run."""
    return any(_movement(run, t) > 0 for t in _updates(run))


def starts_apart(a: Run, b: Run) -> str | None:
    """Returns an array that differs before the first update, or None."""
    return next((name for name in _of(a) if not np.array_equal(a.params[0][name], b.params[0][name])), None)


def apart(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Returns the root mean square of the differences of two sets of parameters."""
    return float(np.sqrt(np.mean(np.concatenate([(a[name] - b[name]).ravel() ** 2 for name in a]))))


def _of(run: Run) -> list[str]:
    return list(run.params[0])


def _updates(run: Run) -> range:
    return range(1, len(run.params))


def _movement(run: Run, t: int) -> float:
    """Returns the root mean square of the movement of the elements that moved."""
    steps = np.concatenate([(run.params[t][name] - run.params[0][name]).ravel() for name in _of(run)])
    steps = steps[steps != 0]
    return float(np.sqrt(np.mean(steps**2))) if steps.size else 0.0


def _distance(a: Run, b: Run, t: int, name: str | None = None) -> float:
    """Returns the distance of an array, or of all of them pooled, after t updates; infinite where one is not finite."""
    names = [name] if name is not None else _of(a)
    x, y, start = (
        np.concatenate([params[name].ravel() for name in names]) for params in (a.params[t], b.params[t], a.params[0])
    )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return 0.0 if np.array_equal(x, y, equal_nan=True) else float("inf")
    gaps = np.abs(x - y)[(x != start) | (y != start)]
    if not gaps.size or not gaps.any():
        return 0.0
    scale = _movement(a, t) or _movement(b, t)
    return float(np.median(gaps)) / scale if scale else float("inf")


def _ulps(run: Run, t: int, name: str) -> float:
    """Returns the rounding of a parameter itself, of the movement."""
    scale, array = _movement(run, t), run.params[t][name]
    return run.rounding[name] * float(np.median(np.abs(array))) / scale if scale and array.size else 0.0


def _is_coarse(loss: float) -> bool:
    """Returns whether a number of so few bits may have been rounded to bfloat16."""
    return (math.frexp(loss)[0] * 2.0**_COARSE).is_integer()


def _loss_gaps(a: Run, b: Run) -> list[float]:
    pairs = zip(a.losses, b.losses, strict=False)  # a layout may report none
    return [0.0 if x == y else abs(x - y) / (abs(x) or 1.0) if np.isfinite([x, y]).all() else np.inf for x, y in pairs]
