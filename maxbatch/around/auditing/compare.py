"""The distance of two runs, and the distance that rounding alone explains.

The distance of two arrays is the root mean square of the differences of their elements that moved,
over the root mean square of the movement of all parameters. It is measured for each array and for
each of its parts: the elements of one index, along every axis. Elements that differ between
permutations of the same rows are noise and left out: Adam turns the rounding of a gradient that is
exactly zero into a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.around.auditing.trainer import Run

LEAST = 1e-5  # of the movement, of the loss: tolerated beside the spread
TIMES = 10.0  # the spread over permutations
_MOST = 0.02  # a larger change is not rounding
_NOISY = 1e-3  # of the movement: an element that changes more between permutations is noise
_MOST_NOISY = 0.25  # of the elements that moved: the most that may be noise
_LEAST_LOSS = 2e-6  # rounding of a float32 sum of some nats, however small the loss
# The same for the first loss, where only the order of a sum differs; the second value for losses in
# bfloat16.
_MOST_FIRST, _MOST_FIRST_COARSE = 2.0**-10, 2.0**-7
_COARSE = 8  # bits of a number in bfloat16


class Tolerance(NamedTuple):
    """The distance of two runs that rounding may cause."""

    # spread of an array and its parts over permutations, of the movement
    params: Mapping[str, list[np.ndarray]] = {}
    noise: Mapping[str, np.ndarray] = {}  # bool: elements of an array that are not compared
    loss: float = 0.0  # spread, of the loss

    @property
    def spread(self) -> float:
        """The median of the spreads of the arrays."""
        return float(np.median([float(spreads[0]) for spreads in self.params.values()] or [0.0]))

    def or_more(self, other: Tolerance) -> Tolerance:
        """Returns the elementwise maximum of two tolerances."""
        params = {
            name: [
                np.maximum(*both)
                for both in zip(spreads, other.params.get(name, spreads), strict=True)
            ]
            for name, spreads in self.params.items()
        }
        noise = {name: mask | other.noise.get(name, mask) for name, mask in self.noise.items()}
        return Tolerance(params, noise, max(self.loss, other.loss))

    @property
    def of_loss(self) -> float:
        """The largest relative difference of a loss."""
        return LEAST + TIMES * self.loss


class Difference(NamedTuple):
    """Two runs that differ by more than rounding."""

    update: int  # the first after which they differ, from 1
    array: str | None  # the one that differs most; None: all parameters agree
    by: float  # its distance, of the movement; or of the loss, of itself
    loss_by: float  # distance of the losses; 0 where they agree


def tolerance(base: Run, permuted: Sequence[Run]) -> tuple[Tolerance, float]:
    """Returns the spread over permutations of the same rows, and the distance that rounding does
    not explain, or 0.
    """
    noise = {name: _noise(base, permuted, name) for name in _of(base)}
    spread = {
        name: _worst(
            _parts(base, run, t, name, noise[name]) for run in permuted for t in _updates(base)
        )
        for name in _of(base)
    }
    pooled = max(_pooled(base, run, t) for run in permuted for t in _updates(base))
    gaps = [_loss_gaps(base, run) for run in permuted]
    loss = max((gap for of_run in gaps for gap in of_run), default=0.0)
    first = max((gap for of_run in gaps for gap in of_run[:1]), default=0.0)
    most_first = _MOST_FIRST_COARSE if is_coarse(base) else _MOST_FIRST
    least = _LEAST_LOSS / _loss_scale(base)
    bounds = ((pooled, _MOST), (loss, max(least, _MOST)), (first, max(least, most_first)))
    if worst := max((x for x, most in bounds if not x <= most), default=0.0):
        return Tolerance(), worst
    return Tolerance(spread, noise, loss), 0.0


def difference(base: Run, other: Run, within: Tolerance) -> Difference | None:
    """Returns the difference of two runs beyond rounding, or None."""
    gaps: dict[tuple[int, str], float] = {}
    for t in _updates(base):
        for name in _of(base):
            noise = within.noise.get(name)
            distances, rounding = _parts(base, other, t, name, noise), _ulps(base, t, name, noise)
            spreads = within.params.get(name) or [np.zeros_like(part) for part in distances]
            most = [
                LEAST + TIMES * spread + ulps
                for spread, ulps in zip(spreads, rounding, strict=True)
            ]
            if any(not (part <= limit).all() for part, limit in zip(distances, most, strict=True)):
                gaps[t, name] = max(float(part.max()) for part in distances if part.size)
    # A loss in bfloat16 may differ by its last bit, and a later loss by the rounding of the
    # parameters before it.
    of_loss = within.of_loss + (_MOST_FIRST_COARSE if is_coarse(base) and is_coarse(other) else 0.0)
    of_params = max(base.rounding.values())
    losses = {
        t: gap
        for t, gap in enumerate(_loss_gaps(base, other), 1)
        if not gap <= of_loss + (t - 1) * of_params
    }
    if not gaps and not losses:
        return None
    array = max(gaps, key=lambda place: gaps[place])[1] if gaps else None
    loss_by = max(losses.values(), default=0.0)
    return Difference(
        min([t for t, _ in gaps] + [*losses]), array, max(gaps.values(), default=loss_by), loss_by
    )


def is_same(a: Run, b: Run) -> tuple[bool, bool]:
    """Returns whether the parameters of two runs are equal, bit for bit, and whether their losses
    are.
    """
    params = all(
        np.array_equal(a.params[-1][name], b.params[-1][name], equal_nan=True) for name in _of(a)
    )
    return params, bool(a.losses) and np.array_equal(a.losses, b.losses, equal_nan=True)


def moved(run: Run) -> bool:
    """Returns whether any parameter changes over the run."""
    return any(_movement(run, t) > 0 for t in _updates(run))


def starts_apart(a: Run, b: Run) -> str | None:
    """Returns an array that differs before the first update, or None."""
    return next(
        (name for name in _of(a) if not np.array_equal(a.params[0][name], b.params[0][name])), None
    )


def apart(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], noise: Mapping[str, np.ndarray]
) -> float:
    """Returns the root mean square of the differences of two sets of parameters, without the
    elements of noise.
    """
    gaps = [(a[name] - b[name])[~noise[name] if name in noise else ...].ravel() for name in a]
    return float(np.sqrt(np.mean(np.concatenate(gaps) ** 2)))


def has_nan(run: Run) -> bool:
    """Returns whether the first update gives NaN, in a parameter or in the loss."""
    return any(np.isnan(array).any() for array in run.params[1].values()) or bool(
        np.isnan(run.losses[:1]).any()
    )


def is_coarse(run: Run) -> bool:
    """Returns whether the losses of a run may have been rounded to bfloat16."""
    return all(map(_is_coarse, run.losses))


def _of(run: Run) -> list[str]:
    return list(run.params[0])


def _updates(run: Run) -> range:
    return range(1, len(run.params))


def _movement(run: Run, t: int) -> float:
    """Returns the root mean square movement of the elements that moved; integers count only if all
    are integers.
    """
    real = [name for name in _of(run) if run.rounding[name]]
    steps = np.concatenate(
        [(run.params[t][name] - run.params[0][name]).ravel() for name in real or _of(run)]
    )
    steps = steps[steps != 0]
    return float(np.sqrt(np.mean(steps**2))) if steps.size else 0.0


def _gaps(a: Run, b: Run, t: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the differences of the elements after t updates, relative to the movement, and which
    elements moved.
    """
    x, y, start = a.params[t][name], b.params[t][name], a.params[0][name]
    with np.errstate(invalid="ignore"):
        gaps = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    scale = _movement(a, t) or _movement(b, t)
    gaps = np.where(np.isfinite(gaps), gaps, np.inf) / (scale or 1.0)
    return gaps, (x != start) | (y != start)


def _pooled(a: Run, b: Run, t: int) -> float:
    """Returns the largest difference of moved elements, leaving out the noisiest ones."""
    values = [gaps[moved] for gaps, moved in (_gaps(a, b, t, name) for name in _of(a))]
    ordered = np.sort(np.concatenate(values))
    return float(ordered[int((1 - _MOST_NOISY) * (ordered.size - 1))]) if ordered.size else 0.0


def _noise(base: Run, permuted: Sequence[Run], name: str) -> np.ndarray:
    """Returns a mask of the elements of an array that are noise."""
    noisy = np.zeros(base.params[0][name].shape, bool)
    for run in permuted:
        for t in _updates(base):
            noisy |= _gaps(base, run, t, name)[0] > _NOISY
    return noisy


def _parts(a: Run, b: Run, t: int, name: str, noise: np.ndarray | None) -> list[np.ndarray]:
    """Returns the distance of an array after t updates, and of its parts along each axis."""
    gaps, counts = _gaps(a, b, t, name)
    return _rms(gaps, counts if noise is None else counts & ~noise)


def _rms(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Returns the root mean square of the elements that count: over all of them, and for each index
    of each axis.
    """
    squares = np.where(counts, values, 0.0) ** 2
    levels = [np.sqrt(squares.sum() / max(1, counts.sum()))]
    for axis in range(values.ndim) if values.size else ():
        others = tuple(other for other in range(values.ndim) if other != axis)
        levels.append(np.sqrt(squares.sum(others) / np.maximum(1, counts.sum(others))))
    return [np.asarray(each) for each in levels]


def _worst(of_runs: Iterable[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns the largest distance of an array and of each part."""
    return [np.max(values, axis=0) for values in zip(*of_runs, strict=True)]


def _ulps(run: Run, t: int, name: str, noise: np.ndarray | None) -> list[np.ndarray]:
    """Returns the rounding of a parameter over t updates, relative to the movement, in an array and
    its parts.
    """
    array, scale = run.params[t][name], _movement(run, t)
    ulps = t * run.rounding[name] * np.abs(array) / (scale or 1.0)
    return _rms(ulps, np.ones(array.shape, bool) if noise is None else ~noise)


def _is_coarse(loss: float) -> bool:
    """Returns whether a number of so few bits may have been rounded to bfloat16."""
    return (math.frexp(loss)[0] * 2.0**_COARSE).is_integer()


def _loss_scale(run: Run) -> float:
    """Returns the largest loss of a run, since a small difference of large terms rounds like the
    terms.
    """
    return max(map(abs, run.losses), default=0.0) or 1.0


def _loss_gaps(a: Run, b: Run) -> list[float]:
    pairs, scale = zip(a.losses, b.losses, strict=False), _loss_scale(a)  # a layout may report none
    return [
        0.0 if x == y else abs(x - y) / scale if np.isfinite([x, y]).all() else np.inf
        for x, y in pairs
    ]
