"""The cause of a broken promise, if runs of the same trainer prove it.

A cause predicts the second run of a counterexample. For example, a trainer that averages the means
of micro-batches computes the update of a whole batch in which the rows of each micro-batch are
repeated until all have equally many trained tokens. A cause is named if its prediction is twenty
times closer to the second run than the run that the promise requires, and five times closer than
the prediction of any other cause. Otherwise the cause is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxbatch.around.auditing import compare
from maxbatch.around.auditing.bench import Bench, Broken
from maxbatch.around.auditing.data import RowSpec
from maxbatch.around.auditing.promises import Comparison, Side, whole
from maxbatch.around.auditing.trainer import Layout, Refused, Run

CAUSES = {
    "not repeatable": "the same run, repeated, gives other numbers",
    "initial parameters": "layouts start from different parameters",
    "optimizer per micro-batch": "the optimizer runs once per micro-batch, not once per batch",
    "last micro-batch": "only the last micro-batch counts",
    "first micro-batch": "only the first micro-batch counts",
    "sum": "micro-batches or devices are added up and not averaged",
    "mean of means": "means of micro-batches or devices are averaged, whatever the number of their trained "
    "tokens",
    "random numbers": "random numbers, such as dropout, depend on the place or the device of a row",
    "low precision": "sums are rounded to a type of few bits, such as bfloat16",
    "dropped rows": "some rows have no effect",
    "mask ignored": "tokens of zero weight are trained on",
    "padding counted": "rows of zero weight count in the number that the loss is divided by",
    "state not saved": "training needs something that is not in the saved state",
}
# clipping in each pass predicts the same: not a cause, but close to some
_STEPS = "steps of equal parts, added up"
_CLOSE = 0.05  # of the distance between the two runs: the largest of a prediction
_CLOSER = 5.0  # times closer than the prediction of another cause
_MOST_ROWS = 512  # of a predicting run
_TERM = 1e-3  # smallest change of a term that is reported
# of the movement: what rounding to a type of few bits changes
_LEAST_ROUNDING, _MOST_ROUNDING = 1e-4, 0.05
_ROUNDINGS = 10.0  # times the rounding of three copies: the most that rounding explains
# smallest relative change of a row's loss by its place; for losses in bfloat16
_PLACE, _PLACE_COARSE = 1e-3, 0.03
_WIDE = 4  # micro-batches or devices that confirm a cause found on two of them
_WIDE_ROWS = 2 * _WIDE


class _Prediction(NamedTuple):
    """The parameters or the loss that a cause predicts."""

    cause: str
    update: int  # after which it holds, from 1
    value: dict[str, np.ndarray] | float


def cause(bench: Bench, name: str, broken: Broken, known: Mapping[str, str | None]) -> str | None:
    """Returns the key in CAUSES of a broken promise, or None.

    Args:
      known: all broken promises, and the causes of those before it.
    """
    trial = broken.trial
    if broken.raised:
        return None
    if not (
        bench.repeats(trial.first) and (trial.second.save_after or bench.repeats(trial.second))
    ):
        return "not repeatable"
    if name == "resume":
        return "state not saved"
    if trial.must_differ:
        side = trial.first
        cut = Comparison(Side(whole(side.rows.num_rows), side.rows), side)
        return (
            len(side.pieces) > 1 and _predicted(bench, cut, known, only_loss=False)
        ) or "dropped rows"
    first, second = bench.run(trial.first), bench.run(trial.second)
    if compare.starts_apart(first, second):
        return "initial parameters"
    if compare.has_nan(second):
        return None
    only_loss = broken.difference.array is None
    if named := _predicted(bench, trial, known, only_loss):
        return named
    named = None if only_loss else _predicted(bench, trial, known, only_loss=True)
    if named and named in known.values():
        return named  # parameters prove it for another promise, and the loss for this one
    if not only_loss and _drops(bench, trial):
        return "dropped rows"
    if _depends_on_place(bench, trial.second):
        return "random numbers"
    return "low precision" if not only_loss and _is_rounding(bench, trial) else None


def terms(bench: Bench, trial: Comparison) -> list[str]:
    """Returns the scalars beside the loss that differ in the second run after the first update."""
    try:
        first, second = bench.run(trial.first).metrics[0], bench.run(trial.second).metrics[0]
        before, again = bench.base.metrics[0], bench.permuted[0].metrics[0]
    except Refused:
        return []
    steady = {name for name in before if _gap(before[name], again.get(name, np.nan)) < _TERM}
    return [
        name
        for name in first
        if name in steady and not _gap(first[name], second.get(name, np.nan)) < _TERM
    ]


def divides_by_zero(bench: Bench, side: Side) -> bool:
    """Returns whether a run with a row without a trained token gives NaN, and a run that trains all
    tokens does not.
    """
    weights = bench.data.batches(side.rows)[0]["weights"]
    full = _run(bench, side.layout, RowSpec(side.rows.rows_given))
    is_nan = compare.has_nan(bench.run(side)) and full is not None and not compare.has_nan(full)
    return is_nan and not weights.any(axis=1).all()


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-12)


def _predicted(
    bench: Bench, trial: Comparison, known: Mapping[str, str | None], only_loss: bool
) -> str | None:
    """Returns the cause whose prediction alone is close to the second run.

    Means of parts with equal numbers of trained tokens are exact: a mean of means breaks neither
    `cut` nor `devices`.
    """
    ratios = _ratios(bench, trial, only_loss)
    if (trial.is_cut and "cut" in known) or (trial.is_spread and "devices" in known):
        ratios.pop("mean of means", None)
    steps = ratios.pop(_STEPS, math.inf)
    if not ratios:
        return None
    best, *others = sorted(ratios, key=lambda cause: ratios[cause])
    if not ratios[best] < _CLOSE or any(ratios[other] < _CLOSER * ratios[best] for other in others):
        return None
    if best != "sum" and steps < _CLOSER * ratios[best]:
        return None
    if best == "mean of means" and not only_loss:
        return best if _keeps_scale(bench, trial) else None
    return best if _is_confirmed(bench, trial, best, only_loss) else None


def _ratios(bench: Bench, trial: Comparison, only_loss: bool) -> dict[str, float]:
    """Returns, by cause, the distance of its closest prediction to the second run, as a share of
    the runs' distance.
    """
    try:
        first, second = bench.run(trial.first), bench.run(trial.second)
    except Refused:
        return {}
    noise, ratios = bench.tolerance_of(trial.first).noise, dict[str, float]()
    for name, update, value in (_losses if only_loss else _params)(bench, trial, first):
        if isinstance(value, float):
            distance, between = (
                abs(value - second.losses[0]),
                abs(first.losses[0] - second.losses[0]),
            )
        else:
            distance = compare.apart(value, second.params[update], noise)
            between = compare.apart(first.params[update], second.params[update], noise)
        ratio = (
            distance / between if between and np.isfinite([distance, between]).all() else math.inf
        )
        ratios[name] = min(ratio, ratios.get(name, math.inf))
    return ratios


def _is_confirmed(bench: Bench, trial: Comparison, name: str, only_loss: bool) -> bool:
    """Returns whether a cause found on two micro-batches or devices also explains four, if the
    trainer has four.
    """
    if name not in ("last micro-batch", "first micro-batch", "sum", "optimizer per micro-batch"):
        return True
    rows = RowSpec(_WIDE_ROWS)
    ratios = _ratios(
        bench,
        Comparison(Side(whole(_WIDE_ROWS), rows), Side(_parts(trial, _WIDE), rows)),
        only_loss,
    )
    return not ratios or ratios.get(name, math.inf) < _CLOSE


def _keeps_scale(bench: Bench, trial: Comparison) -> bool:
    """Returns whether a trainer may change its layout between two updates.

    Adam's steps do not depend on the scale of its gradients, so they hide a sum of means unless the
    scale changes from one update to the next.
    """
    first = Side(whole(_WIDE_ROWS), RowSpec(_WIDE_ROWS))
    try:
        gap = bench.difference(
            Comparison(first, first._replace(save_after=1, then=_parts(trial, _WIDE)))
        )
    except Refused:
        return True
    return gap is None or gap.array is None


def _params(bench: Bench, trial: Comparison, first: Run) -> Iterator[_Prediction]:
    side, last = trial.second, len(first.params) - 1
    yield from _of_untrained(bench, trial, first)
    pieces = _trained_pieces(bench, side)
    if len(pieces) < 2:
        return
    for name, piece in (("last micro-batch", pieces[-1]), ("first micro-batch", pieces[0])):
        if run := _run(bench, whole(piece[1] - piece[0]), side.rows._replace(part=piece)):
            yield _Prediction(name, last, run.params[last])
    most_rows = max(stop - start for start, stop in pieces)
    if run := _run(bench, whole(most_rows), side.rows._replace(sequence=tuple(pieces))):
        yield _Prediction("optimizer per micro-batch", last, run.params[-1])
    yield _Prediction("sum", 1, _stepped(first, [first] * len(pieces), 1.0))
    gradients = [
        _run(bench, whole(stop - start), side.rows._replace(part=(start, stop)))
        for start, stop in pieces
    ]
    weights = bench.data.batches(side.rows)[0]["weights"]
    are_equal = len({weights[slice(*piece)].sum() for piece in pieces}) == 1
    yield _Prediction(
        _STEPS if are_equal else "sum",
        1,
        _stepped(first, [part for part in gradients if part], 1.0),
    )
    if balanced := _balanced(bench, side, pieces):
        yield _Prediction("mean of means", last, balanced.params[last])
        yield _Prediction(
            "mean of means", 1, _stepped(first, [balanced], len(pieces) / len(side.pieces))
        )


def _of_untrained(bench: Bench, trial: Comparison, first: Run) -> Iterator[_Prediction]:
    """Yields the predictions of trainers that count tokens or rows of zero weight."""
    side, rows, last = trial.second, trial.second.rows, len(first.params) - 1
    if rows.other_targets and (run := _run(bench, side.layout, rows._replace(trained="all"))):
        yield _Prediction("mask ignored", last, run.params[last])
    if not rows.padding or side.layout != whole(rows.rows_given):
        return
    if run := _run(bench, side.layout, rows._replace(trained="padding")):
        yield _Prediction("mask ignored", last, run.params[last])
    trained_tokens = float(bench.data.batches(rows)[0]["weights"].sum())
    for count, of_row in (
        (rows.num_rows, 1),
        (trained_tokens, bench.data.length - 1),
        (trained_tokens, bench.data.length),
    ):
        yield _Prediction(
            "padding counted", 1, _stepped(first, [first], count / (count + rows.padding * of_row))
        )


def _losses(bench: Bench, trial: Comparison, first: Run) -> Iterator[_Prediction]:
    """Yields predictions of the first reported loss."""
    side = trial.second
    pieces = _trained_pieces(bench, side)
    runs = [
        _run(bench, whole(stop - start), side.rows._replace(part=(start, stop)))
        for start, stop in pieces
    ]
    losses = [run.losses[0] for run in runs if run is not None and run.losses]
    if not (first.losses and losses) or len(losses) < len(pieces):
        return
    if len(losses) > 1:
        yield _Prediction("last micro-batch", 1, losses[-1])
        yield _Prediction("first micro-batch", 1, losses[0])
        yield _Prediction("sum", 1, float(np.sum(losses)))
    for number in {len(pieces), len(side.pieces)} - {1}:
        yield _Prediction("mean of means", 1, float(np.sum(losses)) / number)


def _stepped(first: Run, runs: list[Run], share: float) -> dict[str, np.ndarray]:
    """Returns the parameters after the sum of the first updates of all runs, as in plain gradient
    descent.
    """
    start = first.params[0]
    return {
        name: start[name] + share * sum(run.params[1][name] - start[name] for run in runs)
        for name in start
    }


def _trained_pieces(bench: Bench, side: Side) -> list[tuple[int, int]]:
    weights = bench.data.batches(side.rows)[0]["weights"]
    return [piece for piece in side.pieces if weights[slice(*piece)].any()]


def _balanced(bench: Bench, side: Side, pieces: list[tuple[int, int]]) -> Run | None:
    """Returns the run on a whole batch of rows repeated until all pieces have equally many trained
    tokens.

    Its mean over tokens is the mean of the pieces' means, with any optimizer. None if the pieces
    already have equal numbers, or if a small batch cannot make them equal.
    """
    weights = bench.data.batches(side.rows)[0]["weights"]
    trained = [int(weights[slice(*piece)].sum()) for piece in pieces]
    rows = [[row for row in range(*piece) if weights[row].any()] for piece in pieces]
    order = [
        row
        for of_piece, number in zip(rows, trained, strict=True)
        for row in of_piece * (math.lcm(*trained) // number)
    ]
    if (len(set(trained)) == 1 and len(pieces) == len(side.pieces)) or len(order) > _MOST_ROWS:
        return None
    return _run(bench, whole(len(order)), side.rows._replace(order=tuple(order), padding=0))


def _run(bench: Bench, layout: Layout, rows: RowSpec) -> Run | None:
    try:
        return bench.run(Side(layout, rows))
    except Refused:
        return None


def _drops(bench: Bench, trial: Comparison) -> bool:
    """Returns whether some trained rows have no effect in a run, and a run on the other rows equals
    it.
    """
    side = trial.second
    run, trained = (
        bench.run(side),
        np.flatnonzero(bench.data.batches(side.rows)[0]["weights"].any(axis=1)).tolist(),
    )
    others = [_run(bench, side.layout, side.rows._replace(replaced=row)) for row in trained]
    counting = [
        row
        for row, other in zip(trained, others, strict=True)
        if other and not compare.is_same(run, other)[0]
    ]
    if None in others or not 0 < len(counting) < len(trained):
        return False
    kept = _run(bench, whole(len(counting)), side.rows._replace(order=tuple(counting), padding=0))
    return kept is not None and compare.difference(kept, run, bench.tolerance) is None


def _depends_on_place(bench: Bench, side: Side) -> bool:
    """Returns whether the loss of a row depends on its place in the batch but not on the rows
    beside it.

    A batch of copies of one row has the loss of the row alone, or the same multiple of it for every
    row, unless the copies meet different random numbers.
    """
    number = side.rows.rows_given
    if number < 2 or not bench.base.losses:
        return False

    def losses(layout: Layout, orders: Iterable[Sequence[int]]) -> np.ndarray:
        runs = [_run(bench, layout, RowSpec(_WIDE_ROWS, order=tuple(order))) for order in orders]
        return np.array(
            [run.losses[0] if run is not None and run.losses else np.nan for run in runs]
        )

    least = _PLACE_COARSE if compare.is_coarse(bench.base) else _PLACE
    alone, copied = (
        losses(whole(1), ([row] for row in range(4))),
        losses(side.layout, ([row] * number for row in range(4))),
    )
    if not (np.isfinite(copied).all() and alone.all()):
        return False
    first, other = (
        losses(side.layout, ([row] + [beside] * (number - 1) for beside in (2, 3)))
        for row in (0, 1)
    )
    scale = abs(bench.base.losses[0]) or 1.0
    is_own = np.ptp(first - other) < 2 * bench.tolerance.of_loss * scale
    return bool(np.ptp(copied / alone) > least and is_own)


def _is_rounding(bench: Bench, trial: Comparison) -> bool:
    """Returns whether rounding to few bits explains the difference of two runs.

    Two copies of the same rows, in one pass or in a pass each, do not change the rounding, since a
    half is exact in binary; three copies do. No other cause behaves so: one that depends on the
    number of rows or passes already shows with two copies, and one that depends on the rows of a
    pass with neither.
    """
    if not (trial.is_cut or trial.is_spread):
        return False
    noise = bench.tolerance_of(trial.first).noise

    def apart(first: Side, second: Side) -> float:
        a, b = bench.run(first), bench.run(second)
        moved = compare.apart(a.params[-1], a.params[0], noise)
        return compare.apart(a.params[-1], b.params[-1], noise) / moved if moved else math.inf

    most = 0.0
    for rows in ((0, 1), (2, 3), (4, 5)):
        once = Side(whole(2), RowSpec(_WIDE_ROWS, order=rows))
        for in_parts in (False, True):
            layouts = [
                _parts(trial, copies) if in_parts else whole(2 * copies) for copies in (2, 3)
            ]
            try:
                two, three = (
                    apart(once, Side(layout, RowSpec(_WIDE_ROWS, order=rows * copies)))
                    for copies, layout in zip((2, 3), layouts, strict=True)
                )
            except Refused:
                continue
            if two > max(three / 4, _LEAST_ROUNDING) or three > _MOST_ROUNDING:
                return False
            most = max(most, three)
    return most > _LEAST_ROUNDING and apart(trial.first, trial.second) < _ROUNDINGS * most


def _parts(trial: Comparison, number: int) -> Layout:
    """Returns the layout with this many passes, or devices if there is one pass, of two rows
    each.
    """
    return Layout(1, number, 2) if trial.is_cut else Layout(number, 1, 2 * number)
