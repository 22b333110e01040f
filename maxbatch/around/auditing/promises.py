"""The promises of a batch, and for each the pairs of runs that must agree.

Shapes: B rows of a batch. The trials of a promise for one B begin with the fewest parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from maxbatch.around.auditing.data import RowSpec
from maxbatch.around.auditing.trainer import Layout

_MOST_DEVICES = 4
_ENOUGH = 2  # updates that show whether a row counts; one update of Adam may not show it


class Side(NamedTuple):
    """One run."""

    layout: Layout
    rows: RowSpec
    # updates after which a fresh trainer continues from the saved state; 0: no resume
    save_after: int = 0
    in_new_process: bool = False  # whether the fresh trainer runs in a new process
    then: Layout | None = None  # the layout of the fresh trainer, if it differs

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The rows of each micro-batch, or of each device if there is one pass."""
        given, per_pass = self.rows.rows_given, self.layout.rows_per_pass
        if self.layout.gradient_accumulation_steps == 1:
            per_pass = -(-given // self.layout.num_devices)
        return [(start, min(start + per_pass, given)) for start in range(0, given, per_pass)]


class Comparison(NamedTuple):
    """Two runs of a trainer that must agree, or differ."""

    first: Side
    second: Side
    must_differ: bool = False
    same_shapes: bool = False  # if the first runs, the second may not raise

    @property
    def is_cut(self) -> bool:
        """Whether the second has several passes."""
        return self.second.layout.gradient_accumulation_steps > 1

    @property
    def is_spread(self) -> bool:
        """Whether the second has several devices."""
        return self.second.layout.num_devices > 1


class Promise(NamedTuple):
    """A row of the table."""

    name: str
    sentence: str
    effect: str  # the effect of breaking it, in words
    trials: Callable[[int, int], Iterator[Comparison]]  # of B rows and U updates
    rows: int = 8  # B of the audit
    least_rows: int = 2  # B of the smallest counterexample


def whole(num_rows: int) -> Layout:
    """Returns the layout of one pass on one device."""
    return Layout(1, 1, num_rows)


def _cuts(num_rows: int) -> Iterator[Layout]:
    yield from (Layout(1, g, num_rows // g) for g in range(2, num_rows + 1) if num_rows % g == 0)


def _spreads(num_rows: int) -> Iterator[Layout]:
    yield from (Layout(n, 1, num_rows) for n in range(2, _MOST_DEVICES + 1) if num_rows % n == 0)
    if num_rows % 4 == 0:
        yield Layout(2, 2, num_rows // 2)


def _against_whole(layouts: Iterator[Layout], rows: RowSpec) -> Iterator[Comparison]:
    first = Side(whole(rows.rows_given), rows)
    yield from (Comparison(first, Side(layout, rows)) for layout in layouts)


def _order(num_rows: int, _: int) -> Iterator[Comparison]:
    layout = whole(num_rows)
    second = Side(layout, RowSpec(num_rows, order=tuple(reversed(range(num_rows)))))
    yield Comparison(Side(layout, RowSpec(num_rows)), second, same_shapes=True)


def _every_row(num_rows: int, _: int) -> Iterator[Comparison]:
    cuts, spreads = list(_cuts(num_rows)), list(_spreads(num_rows))
    for layout in dict.fromkeys([whole(num_rows), *cuts[:1], *cuts[-1:], *spreads[:1]]):
        for row in range(num_rows):
            first = Side(layout, RowSpec(num_rows, updates=_ENOUGH))
            second = Side(layout, first.rows._replace(replaced=row))
            yield Comparison(first, second, must_differ=True, same_shapes=True)


def _weights(num_rows: int, _: int) -> Iterator[Comparison]:
    for layout in (whole(num_rows), *list(_cuts(num_rows))[:1]):
        rows = RowSpec(num_rows, "uneven")
        yield Comparison(
            Side(layout, rows), Side(layout, rows._replace(other_targets=True)), same_shapes=True
        )


def _cut(num_rows: int, _: int) -> Iterator[Comparison]:
    yield from _against_whole(_cuts(num_rows), RowSpec(num_rows))


def _uneven(num_rows: int, _: int) -> Iterator[Comparison]:
    for layouts in (_cuts(num_rows), _spreads(num_rows)):
        yield from _against_whole(layouts, RowSpec(num_rows, "uneven"))


def _empty(num_rows: int, _: int) -> Iterator[Comparison]:
    for layout in (*_cuts(num_rows), *_spreads(num_rows)):
        pieces = max(layout.gradient_accumulation_steps, layout.num_devices)
        for trial in _against_whole(iter([layout]), RowSpec(num_rows, "empty", pieces)):
            yield trial._replace(same_shapes=True)  # like the same cut of full rows, which has run


def _remainder(num_rows: int, _: int) -> Iterator[Comparison]:
    passes = ((g, -(-num_rows // g)) for g in range(2, num_rows) if num_rows % g)
    cuts = [Layout(1, g, per_pass) for g, per_pass in passes if (g - 1) * per_pass < num_rows]
    spreads = [Layout(n, 1, num_rows) for n in (2, 3, 4) if n < num_rows and num_rows % n]
    yield from _against_whole(iter([*cuts, *spreads]), RowSpec(num_rows))


def _padding(num_rows: int, _: int) -> Iterator[Comparison]:
    first = Side(whole(num_rows), RowSpec(num_rows, "uneven"))
    padded = first.rows._replace(padding=max(1, num_rows // 2))
    given = padded.rows_given
    for layout in (whole(given), *_cuts(given), *_spreads(given)):
        yield Comparison(first, Side(layout, padded))


def _devices(num_rows: int, _: int) -> Iterator[Comparison]:
    yield from _against_whole(_spreads(num_rows), RowSpec(num_rows))


def _resume(num_rows: int, updates: int) -> Iterator[Comparison]:
    for layout in (whole(num_rows), *list(_cuts(num_rows))[:1]):
        side = Side(layout, RowSpec(num_rows))
        for after in range(1, updates):
            yield Comparison(side, side._replace(save_after=after), same_shapes=True)
        yield Comparison(side, side._replace(save_after=1, in_new_process=True), same_shapes=True)


PROMISES = (
    Promise(
        "order",
        "the order of the rows of a batch does not matter",
        "the order of the rows changes the update",
        _order,
    ),
    Promise("rows", "every row counts", "a row has no effect", _every_row),
    Promise(
        "weights",
        "what is not trained on adds nothing",
        "tokens of zero weight change the update",
        _weights,
        least_rows=1,
    ),
    Promise("cut", "accumulation does not change the update", "the cut changes the update", _cut),
    Promise(
        "uneven",
        "nor where micro-batches or devices have unequal numbers of trained tokens",
        "unequal numbers of trained tokens change the update of a cut",
        _uneven,
    ),
    Promise(
        "empty",
        "nor where one of them has no trained token",
        "a micro-batch or a device without a trained token changes the update",
        _empty,
    ),
    Promise(
        "remainder",
        "nor where the cut does not divide the batch",
        "a cut that does not divide the batch changes the update",
        _remainder,
        rows=7,
        least_rows=3,
    ),
    Promise(
        "padding",
        "rows of zero weight add nothing",
        "rows of zero weight change the update",
        _padding,
        least_rows=1,
    ),
    Promise(
        "devices",
        "the number of devices does not change the update",
        "the number of devices changes the update",
        _devices,
    ),
    Promise(
        "resume",
        "a saved state goes on as the run that was not stopped",
        "a resume changes the run",
        _resume,
        least_rows=1,
    ),
)
