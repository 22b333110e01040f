"""Where the values of MaxText's arrays lie in a part of one of our parameters.

Along every axis of a stored array, a part takes a few runs of evenly spaced positions: one range of
most axes, every second column of interleaved heads, the layers of the part. So each run of every
axis together are one strided copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.around.maxtext.checkpoints.names import LAYER_AXIS, Place

Spans = tuple[tuple[int, int], ...]  # begin and end along each axis


class Run(NamedTuple):
    """Positions along an axis of a stored array, and where they go along the part's."""

    at: int  # the first
    step: int  # from one to the next
    length: int  # how many there are
    to: int  # where the first goes; the others follow it

    def inside(self, begin: int, end: int) -> tuple[slice, slice] | None:
        """Returns the positions that lie in a range, counted from its beginning, and where they go;
        None if there are none.
        """
        first = max(0, -(-(begin - self.at) // self.step))
        last = min(self.length, -(-(end - self.at) // self.step))
        if first >= last:
            return None
        at = self.at - begin + first * self.step
        step = (last - first - 1) * self.step
        return slice(at, at + step + 1, self.step), slice(self.to + first, self.to + last)


Runs = tuple[tuple[Run, ...], ...]  # along each axis


class Copy(NamedTuple):
    """Values of a piece of a stored array, and where they go."""

    source: tuple[slice, ...]
    target: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return tuple(to.stop - to.start for to in self.target)


def copies(runs: Runs, piece: Spans) -> Iterator[Copy]:
    """Yields what a part takes from a piece of a stored array."""
    along = [
        [both for run in of_axis if (both := run.inside(*span))]
        for of_axis, span in zip(runs, piece, strict=True)
    ]
    for chosen in itertools.product(*along):
        yield Copy(tuple(at for at, _ in chosen), tuple(to for _, to in chosen))


def most_values(runs: Runs, sides: Sequence[int]) -> int:
    """Returns how many values a part can take from a piece of these sides."""
    return math.prod(
        min(side, sum(run.length for run in of_axis))
        for side, of_axis in zip(sides, runs, strict=True)
    )


def lacks_layers(place: Place, name: str) -> bool:
    """Returns whether an array holds one layer of a stack, and so has no axis of layers."""
    return place.is_stacked and place.numbers[place.arrays.index(name)] is None


def with_layers(spans: Spans) -> Spans:
    """Returns a place in an array of one layer as if it had the axis of layers."""
    return (*spans[:LAYER_AXIS], (0, 1), *spans[LAYER_AXIS:])


def runs_of(place: Place, name: str, shape: tuple[int, ...], part: Spans) -> Runs:
    """Returns the runs of an array that a part of a parameter reads; the array has an axis of
    layers if the parameter has.

    Args:
      name: of the array.
      shape: of the parameter.
      part: its place in the parameter.
    """
    one_layer, inside = (shape[1:], part[1:]) if place.is_stacked else (shape, part)
    runs: list[tuple[Run, ...]] = [(Run(begin, 1, end - begin, 0),) for begin, end in inside]
    columns = list(range(one_layer[-1]))
    if place.is_interleaved:  # columns 0, 2, 4, ... there are the first half here
        columns = [*columns[0::2], *columns[1::2]]
        runs[-1] = _runs(columns[slice(*inside[-1])])
    if place.is_flat:
        numbers = np.arange(math.prod(one_layer)).reshape(one_layer)[..., columns]
        runs = [_runs(numbers[tuple(slice(*span) for span in inside)].reshape(-1).tolist())]
    if place.is_stacked:
        layers = [
            (layer - part[0][0], place.numbers[layer] or 0)
            for layer in range(*part[0])
            if place.arrays[layer] == name
        ]
        along = [
            run._replace(to=run.to + first)
            for first, numbers_there in _consecutive(layers)
            for run in _runs(numbers_there)
        ]
        runs.insert(LAYER_AXIS, tuple(along))
    return tuple(runs)


def as_stored(place: Place, part: np.ndarray) -> np.ndarray:
    """Returns a view of a part of a parameter with the axes of the stored arrays."""
    if place.is_flat:
        part = part.reshape((*part.shape[:1], -1) if place.is_stacked else -1)
    return np.moveaxis(part, 0, LAYER_AXIS) if place.is_stacked else part


def _runs(positions: Sequence[int]) -> tuple[Run, ...]:
    """Returns positions as runs, which go to 0, 1, 2, ..."""
    runs: list[Run] = []
    for to, at in enumerate(positions):
        last = runs[-1] if runs else None
        if last and last.length == 1 and at > last.at:
            runs[-1] = last._replace(step=at - last.at, length=2)
        elif last and at == last.at + last.length * last.step:
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(at, 1, 1, to))
    return tuple(runs)


def _consecutive(layers: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Yields neighbouring layers of a part: the first one, and their numbers in the array."""
    for _, group in itertools.groupby(enumerate(layers), lambda item: item[1][0] - item[0]):
        both = [layer for _, layer in group]
        yield both[0][0], [number for _, number in both]
