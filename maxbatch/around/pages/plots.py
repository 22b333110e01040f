"""Figures from lists of numbers, as plain values that page.js draws.

The page sets the colours of text, grid and background, for light and dark. One run, or one group,
has one colour everywhere: `colour(index)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_COLOURS = (
    "#3b82f6",
    "#f97316",
    "#10b981",
    "#e11d48",
    "#8b5cf6",
    "#ca8a04",
    "#06b6d4",
    "#ec4899",
    "#65a30d",
    "#a16207",
)
_MOST_GROUPS = 10
MARKS = ("stars", "squares", "triangles")  # styles of single updates, in the colour of their run


class Axis(NamedTuple):
    """An axis of a figure."""

    title: str
    kind: str = "linear"  # `linear`, `log` or `category`
    ticks: tuple[float, ...] = ()  # empty: chosen by the library
    categories: tuple[str, ...] = ()  # of a `category` axis, in their order


class Series(NamedTuple):
    """Points of a figure, joined by a line in some styles."""

    name: str  # in the legend; "" for none
    style: str  # `dots`, `joined`, `dotted` or `rings`, or one of a panel's lines
    colour: str
    x: Sequence[float | str]  # N values, or categories
    y: Sequence[float | None]  # N values; None where there is none
    texts: Sequence[str]  # N texts that hovering shows, of one or more lines; empty: it shows none
    errors: Sequence[float | None] = ()  # N half lengths of vertical bars; None, or empty: no bar


class HeatMap(NamedTuple):
    """Values of a grid, as colours: X columns, Y rows."""

    name: str  # of the values
    x: Sequence[float | str]  # X
    y: Sequence[str]  # Y
    values_YxX: Sequence[Sequence[float | None]]  # None leaves the cell empty
    palette: str  # `values`, from the smallest to the largest, or `loads`, from 0 over 1 to 2
    has_numbers: bool = False  # whether the cells show their values


class Figure(NamedTuple):
    """A figure with its own data: series, or a heat map."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    heat_map: HeatMap | None = None
    note: str = ""  # below the figure


class Panel(NamedTuple):
    """A figure of columns of runs, against the x axis that the page's reader chooses."""

    title: str
    unit: str  # of the y axis
    # column and style: `line`, `faint`, `stairs`, `points` or one of `MARKS`
    lines: tuple[tuple[str, str], ...]
    is_log: bool = False  # whether the y axis starts logarithmic
    are_large: bool = False  # whether ticks of the y axis are written as 40k
    smooths: bool = True  # whether the page's slider smooths its lines
    note: str = ""  # below the figure


class RunColumns(NamedTuple):
    """The columns of a run that are drawn."""

    name: str  # names the run on the page
    axes: dict[str, list[float]]  # by axis (`pages.page.AXES`): its value at each drawn update
    columns: dict[str, list[float | None]]  # by column: its value there; None if missing


def colour(index: int) -> str:
    """Returns the colour of the run, or group, of this index; readable on white and on black."""
    if index < len(_COLOURS):
        return _COLOURS[index]
    return f"hsl({index * 137.5 % 360:.0f}, 60%, 50%)"  # the golden angle: neighbours differ


def metric_against_key(
    key: str, metric: str, trials: Sequence[tuple[Mapping[str, str], float, str]], is_log: bool
) -> Figure:
    """Draws a metric against one of the varied keys, from overrides, metric and label of each
    trial.

    With two keys, if the other one has few values that several trials share, each value has its
    colour; a line joins its trials if the two keys make a grid, so that the lines compare the same
    values. Sampled values make none. The x axis is logarithmic if its values are numbers and
    `is_log`.
    """
    others = [name for name in trials[0][0] if name != key]
    groups = {overrides[others[0]] for overrides, _, _ in trials} if len(others) == 1 else set()
    if not 1 < len(groups) <= min(_MOST_GROUPS, len(trials) // 2):
        groups = {""}
    style = "joined" if len(groups) > 1 and is_grid((key, others[0]), trials) else "dots"
    numbers = [_number(overrides[key]) for overrides, _, _ in trials]
    # For a single value, a numeric axis would show a range that was not swept.
    is_number = None not in numbers and len(set(numbers)) > 1
    series = []
    for index, group in enumerate(sorted(groups, key=_sort_key)):
        inside = [trial for trial in trials if not group or trial[0][others[0]] == group]
        inside.sort(key=lambda trial: _sort_key(trial[0][key]))
        series.append(
            Series(
                name=f"{others[0]}={group}" if group else "",
                style=style,
                colour=colour(index),
                x=[
                    number
                    if is_number and (number := _number(overrides[key])) is not None
                    else overrides[key]
                    for overrides, _, _ in inside
                ],
                y=[value for _, value, _ in inside],
                texts=[f"{label}\n{metric} {value}" for _, value, label in inside],
            )
        )
    if not is_number:
        categories = tuple(sorted({overrides[key] for overrides, _, _ in trials}, key=_sort_key))
        return Figure(
            f"{metric} against {key}",
            Axis(key, "category", (), categories),
            Axis(metric),
            tuple(series),
        )
    values = sorted({number for number in numbers if number is not None})
    # The values themselves are better ticks than powers of ten.
    are_ticks = is_log and len(values) <= 8 and all(len(f"{value:g}") <= 6 for value in values)
    x_axis = Axis(key, "log" if is_log else "linear", tuple(values) if are_ticks else ())
    return Figure(f"{metric} against {key}", x_axis, Axis(metric), tuple(series))


def is_grid(keys: tuple[str, str], trials: Sequence[tuple[Mapping[str, str], float, str]]) -> bool:
    """Returns whether more than half of the pairs of two keys' values have a trial, as in a
    grid.
    """
    cells = {(overrides[keys[0]], overrides[keys[1]]) for overrides, _, _ in trials}
    columns, rows = ({cell[axis] for cell in cells} for axis in (0, 1))
    return 2 * len(cells) > len(columns) * len(rows)


def heat_map(
    keys: tuple[str, str], metric: str, trials: Sequence[tuple[Mapping[str, str], float, str]]
) -> Figure:
    """Draws the metric over two keys, a cell for each pair of values; trials that share a cell show
    the best.
    """
    across, up = keys
    columns = sorted({overrides[across] for overrides, _, _ in trials}, key=_sort_key)
    rows = sorted({overrides[up] for overrides, _, _ in trials}, key=_sort_key)
    best: dict[tuple[str, str], float] = {}
    for overrides, value, _ in trials:
        cell = overrides[up], overrides[across]
        best[cell] = min(value, best.get(cell, value))
    values_YxX = [[best.get((row, column)) for column in columns] for row in rows]
    return Figure(
        f"{metric} over {across} and {up}",
        Axis(across, "category", (), tuple(columns)),
        Axis(up, "category", (), tuple(rows)),
        heat_map=HeatMap(metric, columns, rows, values_YxX, "values", has_numbers=True),
    )


def loads_over_time(
    title: str, steps: Sequence[int], choices: Sequence[Mapping[str, int]]
) -> Figure:
    """Draws the load of each expert at some updates, from its number of chosen tokens: 1 is the
    mean.
    """
    experts = sorted(choices[0], key=_sort_key)
    means = [max(1, sum(of.values())) / len(experts) for of in choices]
    loads = [
        [of.get(expert, 0) / mean for of, mean in zip(choices, means, strict=True)]
        for expert in experts
    ]
    return Figure(
        title,
        Axis("updates"),
        Axis("expert", "category", (), tuple(experts)),
        heat_map=HeatMap("load", list(steps), experts, loads, "loads"),
        note="Choices over those of the mean expert, over all layers.",
    )


class BatchCurve(NamedTuple):
    """The losses of branches of one checkpoint at several batch sizes."""

    label: str  # names the checkpoint, such as "step 400"
    batch_sizes: Sequence[int]
    losses: Sequence[float | None]  # smoothed, at the end of each branch; None where it diverged
    # the largest loss within the tolerance of the base; None: every branch diverged
    tolerated_loss: float | None
    # the largest batch within the tolerance; None where there is none
    critical_batch_size: int | None
    # standard errors of the differences from the base; empty: unknown
    errors: Sequence[float | None] = ()


def loss_against_batch(curves: Sequence[BatchCurve]) -> Figure:
    """Draws loss against batch size, a curve for each checkpoint with its tolerance as a dotted
    line.
    """
    series = []
    for index, curve in enumerate(curves):
        sizes, losses = list(curve.batch_sizes), list(curve.losses)
        errors = list(curve.errors or [None] * len(sizes))
        texts = [
            f"{curve.label}\nbatch {size:,}\nloss {loss}"
            + ("" if error is None else f" ± {error:.4f}")
            for size, loss, error in zip(sizes, losses, errors, strict=True)
        ]
        series.append(Series(curve.label, "joined", colour(index), sizes, losses, texts, errors))
        ends, tolerated = [min(sizes), max(sizes)], curve.tolerated_loss
        series.append(
            Series(
                "",
                "dotted",
                colour(index),
                ends,
                [tolerated] * 2,
                [f"{curve.label}\ntolerated {tolerated}"] * 2,
            )
        )
        critical = curve.critical_batch_size
        if critical is not None and critical in sizes:
            series.append(
                Series("", "rings", colour(index), [critical], [losses[sizes.index(critical)]], [])
            )
    ticks = tuple(sorted({size for curve in curves for size in curve.batch_sizes}))
    note = "Dotted: the largest loss within the tolerance. Ringed: the largest batch below it."
    if any(error is not None for curve in curves for error in curve.errors):
        note += " Bars: one standard error of the difference from the base."
    x_axis = Axis("samples per update", "log", ticks)
    return Figure(
        "Loss against batch size", x_axis, Axis("smoothed loss"), tuple(series), note=note
    )


def _number(text: str) -> float | None:
    top, _, bottom = text.partition("/")
    try:
        number = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return number if math.isfinite(number) else None


def _sort_key(text: str) -> tuple[float, str]:
    number = _number(text)
    return (float("inf") if number is None else number), text
