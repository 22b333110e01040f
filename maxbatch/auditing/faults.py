"""Names the fault behind a broken promise, by runs of the same trainer that the fault would make equal.

A hypothesis explains a run if it is ten times closer to it than the run that the promise requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from maxbatch.auditing import compare
from maxbatch.auditing.bench import Bench, Broken
from maxbatch.auditing.data import RowSpec
from maxbatch.auditing.promises import Comparison, Side, whole
from maxbatch.auditing.trainer import Layout, Refused, Run

FAULTS = {
    "initial parameters": "layouts start from different parameters",
    "optimizer per micro-batch": "the optimizer runs once per micro-batch, not once per batch",
    "last micro-batch": "only the last micro-batch counts",
    "first micro-batch": "only the first micro-batch counts",
    "sum": "micro-batches or devices are added up and not averaged",
    "mean of means": "means of micro-batches or devices are averaged, whatever the number of their trained tokens",
    "random numbers": "random numbers, such as dropout, depend on the place or the device of a row",
    "low precision": "gradients are accumulated in a type of few bits, such as bfloat16",
    "term as a mean": "a term of the loss is added as a mean per micro-batch, so that it weighs more with every cut",
    "order": "the update depends on the order of the rows: random numbers by place, or rows that count unequally",
    "dropped rows": "some rows have no effect",
    "weights ignored": "tokens of zero weight are trained on",
    "term of untrained tokens": "a term of the loss counts tokens of zero weight",
    "empty micro-batch": "a micro-batch or a device without a trained token changes the update, as 0 / 0 does",
    "uneven cut": "rows of a batch that the cut does not divide count unequally",
    "padding trained on": "rows of zero weight are trained on, or count as rows or tokens",
    "resume": "the state does not hold all that training needs, or training goes on at another step",
}
_CLOSER = 0.1
_LOW_PRECISION = 0.03  # largest share of the movement that rounding to 8 bits changes
_TERM = 1e-3  # smallest change of a term that is reported
_OWN = {
    "order": "order",
    "rows": "dropped rows",
    "weights": "weights ignored",
    "uneven": "mean of means",
    "empty": "empty micro-batch",
    "remainder": "uneven cut",
    "padding": "padding trained on",
    "devices": "random numbers",
    "resume": "resume",
}


def fault(bench: Bench, name: str, broken: Broken, known: Mapping[str, str]) -> str:
    """Returns the key in FAULTS of a broken promise.

    Args:
      bench: its runs.
      name: of the promise.
      broken: its smallest counterexample.
      known: the faults of earlier broken promises in the table.
    """
    trial = broken.trial
    if name in ("order", "rows", "resume"):
        return _OWN[name]
    if name == "weights":
        return "term of untrained tokens" if terms(bench, trial) else _OWN[name]
    if name == "remainder" and "cut" not in known and not broken.raised and _drops(bench, trial.second):
        return "dropped rows"
    if not broken.raised:
        first, second = bench.run(trial.first), bench.run(trial.second)
        if compare.starts_apart(first, second):
            return "initial parameters"
        if found := _explained(bench, trial, first, second, only_loss=broken.difference.array is None):
            return found
    if name == "cut" or (name == "devices" and "cut" not in known):
        return _of_layout(bench, broken, known)
    causes = [cause for cause in ("cut", "uneven") if cause in known and (trial.is_cut or trial.is_spread)]
    causes += [cause for cause in ("rows", "weights") if cause in known and name in ("remainder", "padding")]
    return known[causes[0]] if causes else _OWN[name]


def _of_layout(bench: Bench, broken: Broken, known: Mapping[str, str]) -> str:
    """Returns the fault that remains if all micro-batches and devices have equal numbers of trained tokens."""
    if "rows" in known:
        return known["rows"]
    if "order" in known:
        return "random numbers"
    if broken.trial.is_spread:
        return "low precision" if broken.difference.by < _LOW_PRECISION else "random numbers"
    return "low precision" if _order_matters(bench) else "term as a mean"


def terms(bench: Bench, trial: Comparison) -> list[str]:
    """Returns the scalars beside the loss that differ in the second run after the first update."""
    try:
        first, second = bench.run(trial.first).metrics[0], bench.run(trial.second).metrics[0]
        before, again = bench.base.metrics[0], bench.permuted[0].metrics[0]
    except Refused:
        return []
    steady = {name for name in before if _gap(before[name], again.get(name, np.nan)) < _TERM}
    return [name for name in first if name in steady and not _gap(first[name], second.get(name, np.nan)) < _TERM]


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-12)


def _explained(bench: Bench, trial: Comparison, first: Run, second: Run, only_loss: bool) -> str:
    """Returns the hypothesis that comes closest to the second run, if it is close, or an empty string."""
    candidates = _losses(bench, trial, first) if only_loss else _params(bench, trial, first)
    best, least = "", _CLOSER
    for name, at, guess in candidates:
        if isinstance(guess, float):
            ratio = abs(guess - second.losses[at]) / max(abs(first.losses[at] - second.losses[at]), 1e-300)
        else:
            ratio = compare.apart(guess, second.params[at]) / max(
                compare.apart(first.params[at], second.params[at]), 1e-300
            )
        if ratio < least:
            best, least = name, ratio
    return best


def _trained_pieces(bench: Bench, side: Side) -> list[tuple[int, int]]:
    weights = bench.data.batches(side.rows)[0]["weights"]
    return [piece for piece in side.pieces if weights[slice(*piece)].any()]


def _is_even(bench: Bench, side: Side) -> bool:
    """Returns whether all micro-batches, or devices, have equal numbers of trained tokens."""
    weights = bench.data.batches(side.rows)[0]["weights"]
    return len({float(weights[slice(*piece)].sum()) for piece in side.pieces}) == 1


def _params(bench: Bench, trial: Comparison, first: Run) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """Yields hypotheses, the update after which each holds, and the parameters that it predicts."""
    side, last = trial.second, bench.data.updates
    pieces = _trained_pieces(bench, side)
    if len(pieces) < 2:
        return
    ends = [("last micro-batch", pieces[-1]), ("first micro-batch", pieces[0])]
    for name, piece in ends:
        if run := _run(bench, whole(piece[1] - piece[0]), side.rows._replace(part=piece)):
            yield name, last, run.params[last]
    sizes = {stop - start for start, stop in pieces}
    if len(sizes) == 1:
        run = _run(bench, whole(sizes.pop()), side.rows._replace(sequence=tuple(pieces)))
        if run is not None:
            yield "optimizer per micro-batch", last, run.params[-1]
    yield "sum", 1, _stepped(first, [first] * len(pieces), 1.0)
    parts = [_run(bench, whole(stop - start), side.rows._replace(part=(start, stop))) for start, stop in pieces]
    found = [part for part in parts if part is not None]
    if found and not _is_even(bench, side):  # of equal numbers of tokens it is the mean
        yield "mean of means", 1, _stepped(first, found, 1 / len(side.pieces))


def _stepped(first: Run, runs: list[Run], share: float) -> dict[str, np.ndarray]:
    """Returns the parameters after the first updates of all runs are added up; that of plain gradient descent."""
    start = first.params[0]
    return {name: start[name] + share * sum(run.params[1][name] - start[name] for run in runs) for name in start}


def _losses(bench: Bench, trial: Comparison, first: Run) -> Iterator[tuple[str, int, float]]:
    """Yields hypotheses, an update, and the predicted loss; parameters agree, so any update will do."""
    pieces = _trained_pieces(bench, trial.second)
    if len(pieces) < 2:
        return
    rows = trial.second.rows
    runs = [_run(bench, whole(stop - start), rows._replace(part=(start, stop))) for start, stop in pieces]
    found = [run.losses[0] for run in runs if run is not None and run.losses]
    if len(found) == len(pieces):
        yield "last micro-batch", 0, found[-1]
        yield "first micro-batch", 0, found[0]
        yield "mean of means", 0, float(np.mean(found))
        yield "sum", 0, float(np.sum(found))


def _run(bench: Bench, layout: Layout, rows: RowSpec) -> Run | None:
    try:
        return bench.run(Side(layout, rows))
    except Refused:
        return None


def _drops(bench: Bench, side: Side) -> bool:
    """Returns whether a row of the run has no effect."""
    base = bench.run(side)
    others = (_run(bench, side.layout, side.rows._replace(replaced=row)) for row in range(side.rows.num_rows))
    return any(compare.is_same(base, other)[0] for other in others if other is not None)


def _order_matters(bench: Bench) -> bool:
    """Returns whether the order of four micro-batches changes the update by no more than low precision does."""
    layout, rows = Layout(1, 4, 2), RowSpec(8)
    runs = [_run(bench, layout, rows._replace(order=order)) for order in ((), (6, 7, 4, 5, 2, 3, 0, 1))]
    if runs[0] is None or runs[1] is None:
        return False
    found = compare.difference(runs[0], runs[1], bench.tolerance)
    return found is not None and found.by < _LOW_PRECISION
