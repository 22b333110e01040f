"""Figures as plain plotly.js dictionaries, from lists of numbers.

The page sets the colours of text, grid and background, for light and dark. One run, or one group, has one colour
everywhere: `colour(index)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_COLOURS = (
    "#3b82f6", "#f97316", "#10b981", "#e11d48", "#8b5cf6", "#ca8a04", "#06b6d4", "#ec4899", "#65a30d", "#a16207",
)  # fmt: skip
_MOST_GROUPS = 10


class Figure(NamedTuple):
    """A figure with its own data."""

    title: str
    data: Sequence[Mapping[str, object]]  # plotly.js traces
    layout: Mapping[str, object]  # of plotly.js, without colours
    note: str = ""  # below the figure


class Panel(NamedTuple):
    """A figure of columns of runs, against the x axis that the page's reader chooses."""

    title: str
    unit: str  # of the y axis
    lines: tuple[tuple[str, str], ...]  # column and style: `line`, `faint`, `stairs` or `points`
    is_log: bool = False  # whether the y axis starts logarithmic
    tick_format: str = "~g"  # d3 format of the y axis
    smooths: bool = True  # whether the page's slider smooths its lines


def colour(index: int) -> str:
    """Returns the colour of the run, or group, of this index; readable on white and on black."""
    if index < len(_COLOURS):
        return _COLOURS[index]
    return f"hsl({index * 137.5 % 360:.0f}, 60%, 50%)"  # the golden angle: neighbours differ


def metric_against_key(
    key: str, metric: str, trials: Sequence[tuple[Mapping[str, str], float, str]], is_log: bool
) -> Figure:
    """Draws a metric against one of the varied keys, from overrides, metric and label of each trial.

    With two keys, if the other one has few values, a line joins trials that share its value. The x axis is
    logarithmic if its values are numbers and `is_log`.
    """
    others = [name for name in trials[0][0] if name != key]
    groups = {overrides[others[0]] for overrides, _, _ in trials} if len(others) == 1 else set()
    if not 1 < len(groups) <= _MOST_GROUPS:
        groups = {""}
    numbers = [_number(overrides[key]) for overrides, _, _ in trials]
    # For a single value, a numeric axis would show a range that was not swept.
    is_number = None not in numbers and len(set(numbers)) > 1
    data = []
    for index, group in enumerate(sorted(groups, key=_sort_key)):
        inside = [trial for trial in trials if not group or trial[0][others[0]] == group]
        inside.sort(key=lambda trial: _sort_key(trial[0][key]))
        data.append({
            "type": "scatter", "name": f"{others[0]}={group}" if group else metric,
            "mode": "lines+markers" if group else "markers",
            "x": [_number(overrides[key]) if is_number else overrides[key] for overrides, _, _ in inside],
            "y": [value for _, value, _ in inside],
            "text": [label for _, _, label in inside],
            "customdata": [value for _, value, _ in inside],
            "hovertemplate": f"%{{text}}<br>{metric} %{{customdata}}<extra></extra>",
            "line": {"color": colour(index), "width": 1.5},
            "marker": {"color": colour(index), "size": 8},
        })  # fmt: skip
    kind = ("log" if is_log else "linear") if is_number else "category"
    ticks: dict[str, object] = {}
    values = sorted({number for number in numbers if number is not None})
    if is_number and is_log and len(values) <= 8 and all(len(f"{value:g}") <= 6 for value in values):
        # the values themselves are better ticks than powers of ten
        ticks = {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
    layout = {
        "xaxis": {"title": {"text": key}, "type": kind, **ticks},
        "yaxis": {"title": {"text": metric}},
        "showlegend": len(data) > 1,
    }
    return Figure(f"{metric} against {key}", data, layout)


def heat_map(keys: tuple[str, str], metric: str, trials: Sequence[tuple[Mapping[str, str], float, str]]) -> Figure:
    """Draws the metric over two keys, a cell for each pair of values; trials that share a cell show the best."""
    across, up = keys
    columns = sorted({overrides[across] for overrides, _, _ in trials}, key=_sort_key)
    rows = sorted({overrides[up] for overrides, _, _ in trials}, key=_sort_key)
    best: dict[tuple[str, str], float] = {}
    for overrides, value, _ in trials:
        cell = overrides[up], overrides[across]
        best[cell] = min(value, best.get(cell, value))
    values = [[best.get((row, column)) for column in columns] for row in rows]
    trace = {
        "type": "heatmap", "x": columns, "y": rows, "z": values, "colorscale": "Viridis", "reversescale": True,
        "texttemplate": "%{z:.4g}", "customdata": values, "hoverongaps": False, "xgap": 2, "ygap": 2,
        "colorbar": {"title": {"text": metric}, "thickness": 12},
        "hovertemplate": f"{across} %{{x}}<br>{up} %{{y}}<br>{metric} %{{customdata}}<extra></extra>",
    }  # fmt: skip
    axes = {"xaxis": across, "yaxis": up}
    layout = {axis: {"title": {"text": key}, "type": "category"} for axis, key in axes.items()}
    return Figure(f"{metric} over {across} and {up}", [trace], layout)


def loads_over_time(title: str, steps: Sequence[int], choices: Sequence[Mapping[str, int]]) -> Figure:
    """Draws the load of each expert at some updates, from its number of chosen tokens: 1 is the mean."""
    experts = sorted(choices[0], key=_sort_key)
    means = [max(1, sum(of.values())) / len(experts) for of in choices]
    loads = [[of.get(expert, 0) / mean for of, mean in zip(choices, means, strict=True)] for expert in experts]
    trace = {
        "type": "heatmap", "x": list(steps), "y": experts, "z": loads, "customdata": loads, "colorscale": "RdBu",
        "zmid": 1, "zmin": 0, "zmax": 2, "colorbar": {"title": {"text": "load"}, "thickness": 12},
        "hovertemplate": "update %{x:,}<br>expert %{y}<br>load %{customdata:.3f}<extra></extra>",
    }  # fmt: skip
    layout = {"xaxis": {"title": {"text": "updates"}}, "yaxis": {"title": {"text": "expert"}, "type": "category"}}
    return Figure(title, [trace], layout, "Choices over those of the mean expert, over all layers.")


class BatchCurve(NamedTuple):
    """The losses of branches of one checkpoint at several batch sizes."""

    label: str  # names the checkpoint, such as "step 400"
    batch_sizes: Sequence[int]
    losses: Sequence[float | None]  # smoothed, at the end of each branch; None where it diverged
    tolerated_loss: float | None  # the largest loss within the tolerance of the base; None: every branch diverged
    critical_batch_size: int | None  # the largest batch within the tolerance; None where there is none


def loss_against_batch(curves: Sequence[BatchCurve]) -> Figure:
    """Draws loss against batch size, a curve for each checkpoint with its tolerance as a dotted line."""
    data: list[Mapping[str, object]] = []
    for index, curve in enumerate(curves):
        line = {"type": "scatter", "legendgroup": curve.label, "name": curve.label}
        data.append(line | {
            "mode": "lines+markers", "x": list(curve.batch_sizes), "y": list(curve.losses),
            "customdata": list(curve.losses), "line": {"color": colour(index)}, "marker": {"size": 8},
            "hovertemplate": f"{curve.label}<br>batch %{{x}}<br>loss %{{customdata}}<extra></extra>",
        })  # fmt: skip
        data.append(line | {
            "mode": "lines", "x": [min(curve.batch_sizes), max(curve.batch_sizes)], "y": [curve.tolerated_loss] * 2,
            "customdata": [curve.tolerated_loss] * 2, "line": {"color": colour(index), "dash": "dot", "width": 1},
            "showlegend": False, "hovertemplate": f"{curve.label}<br>tolerated %{{customdata}}<extra></extra>",
        })  # fmt: skip
        critical = curve.critical_batch_size
        if critical is not None and critical in curve.batch_sizes:
            at = list(curve.batch_sizes).index(critical)
            data.append(line | {
                "mode": "markers", "x": [critical], "y": [curve.losses[at]], "showlegend": False,
                "marker": {"color": colour(index), "size": 15, "symbol": "circle-open", "line": {"width": 2}},
                "hovertemplate": f"{curve.label}<br>critical batch %{{x}}<extra></extra>",
            })  # fmt: skip
    sizes = sorted({size for curve in curves for size in curve.batch_sizes})
    ticks = {"tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
    layout = {
        "xaxis": {"title": {"text": "samples per update"}, "type": "log", **ticks},
        "yaxis": {"title": {"text": "smoothed loss"}},
    }
    note = "Dotted: the largest loss within the tolerance. Ringed: the largest batch below it."
    return Figure("Loss against batch size", data, layout, note)


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
