"""Figures of a page as SVG files, for papers: text stays text, and nothing needs a browser.

A figure of runs is drawn against updates, as the page first shows it. Sizes are in pixels.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxbatch.around.pages.plots import (
    MARKS,
    Axis,
    Figure,
    HeatMap,
    Panel,
    RunColumns,
    Series,
    colour,
)

_WIDTH, _HEIGHT = 640, 400
_FONT, _CHARACTER = 13, 6.9  # height of the text, and the mean width of its characters
_TOP, _RIGHT, _TICK, _LINE = 34, 18, 5, 20  # the title, the right margin, a tick, a line of text
_TEXT, _GRID = "#1c2330", "#dde1e8"
_VIRIDIS = (
    "#440154",
    "#482878",
    "#3e4989",
    "#31688e",
    "#26828e",
    "#1f9e89",
    "#35b779",
    "#6ece58",
    "#b5de2b",
    "#fde725",
)
_RED_BLUE = (
    "#053061",
    "#2166ac",
    "#4393c3",
    "#92c5de",
    "#d1e5f0",
    "#f7f7f7",
    "#fddbc7",
    "#f4a582",
    "#d6604d",
    "#b2182b",
    "#67001f",
)
_LINES = {
    "line": "",
    "joined": "",
    "stairs": "",
    "faint": ' stroke-opacity="0.35"',
    "dotted": ' stroke-dasharray="2 3"',
}
_DOTS = ("joined", "dots")
_SHAPES: dict[str, list[tuple[float, float]]] = {
    "stars": [
        (r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5))
        for i, r in enumerate((8, 3.5) * 5)
    ],
    "squares": [(-5, -5), (5, -5), (5, 5), (-5, 5)],
    "triangles": [(0, -7), (6, 5), (-6, 5)],
}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BAR_WIDTH, _BAR_STEPS = 14, 40  # of the scale of colours


def file_names(titles: Sequence[str]) -> list[str]:
    """Returns a file name for each title, from its words before a bracket or comma; no two are
    equal.
    """
    names: list[str] = []
    for title in titles:
        stem = "-".join(re.findall(r"[a-z0-9]+", re.split(r"[(,]", title.lower())[0])) or "plot"
        name, number = f"{stem}.svg", 2
        while name in names:
            name, number = f"{stem}-{number}.svg", number + 1
        names.append(name)
    return names


def figure_of(panel: Panel, runs: Sequence[RunColumns], unit: str) -> Figure:
    """Returns a figure of runs as one that holds its own data, against their updates, which are
    labelled `unit`.

    Lines of one run are named by their columns, those of several by their runs; marks are named
    once.
    """
    series: list[Series] = []
    for index, run in enumerate(runs):
        lines = [
            line
            for line in panel.lines
            if any(value is not None for value in run.columns.get(line[0], ()))
        ]
        named = next((line for line in lines if line[1] != "faint"), lines[0] if lines else None)
        for column, style in lines:
            name = (
                column.replace("_", " ")
                if len(runs) == 1
                else run.name
                if (column, style) == named
                else column
                if style in MARKS and all(other.name != column for other in series)
                else ""
            )
            series.append(
                Series(name, style, colour(index), run.axes["steps"], run.columns[column], ())
            )
    y = Axis(panel.unit or panel.title, "log" if panel.is_log else "linear")
    return Figure(panel.title, Axis(unit), y, tuple(series), note=panel.note)


def svg_of(figure: Figure) -> str:
    """Returns a figure as the text of an SVG file, on white."""
    heat_map = figure.heat_map
    legend = _legend_lines([s for s in figure.series if s.name]) if len(figure.series) > 1 else []
    top = _TOP + _LINE * len(legend)
    if heat_map is None:
        x_values = [value for series in figure.series for value in series.x]
        x, y = (
            _Scale.of(figure.x, x_values),
            _Scale.of(figure.y, [v for s in figure.series for v in _extents(s)]),
        )
    else:
        x, y = _scale_of_cells(figure.x, heat_map.x), _scale_of_cells(figure.y, heat_map.y)
    y_labels = [label for _, label in y.ticks()]
    left = 34 + _CHARACTER * max(map(len, y_labels), default=1) + _TICK
    right = _WIDTH - _RIGHT - (70 if heat_map else 0)
    x_ticks = list(x.ticks())
    is_turned = (
        sum(len(label) + 2 for _, label in x_ticks) * _CHARACTER > right - left
        and figure.x.kind == "category"
    )
    longest = max((len(label) for _, label in x_ticks), default=1)
    bottom = _HEIGHT - 46 - (0.6 * _CHARACTER * longest if is_turned else 0)
    at_x, at_y = x.placed(left, right), y.placed(bottom, top)
    elements = [
        _text(_WIDTH / 2, 22, figure.title, size=_FONT + 2, more=' font-weight="600"'),
        *_legend(legend, left),
        *_axis_x(x_ticks, at_x, left, right, top, bottom, is_turned),
        *_axis_y(y.ticks(), at_y, left, right, bottom),
        f'<path d="M{left:.1f} {top}V{bottom:.1f}H{right:.1f}" fill="none" stroke="{_TEXT}"/>',
        _text((left + right) / 2, _HEIGHT - 10, figure.x.title),
        _text(
            16,
            (top + bottom) / 2,
            figure.y.title,
            more=f' transform="rotate(-90 16 {(top + bottom) / 2:.1f})"',
        ),
    ]
    if heat_map:
        elements += _cells(heat_map, at_x, at_y, right, top, bottom)
    for series in figure.series:
        elements += _drawn(series, x, y, at_x, at_y)
    described = f"<desc>{_escaped(figure.note)}</desc>" if figure.note else ""
    body = "\n".join(elements)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" '
        f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{_FONT}" '
        f'fill="{_TEXT}">\n<title>{_escaped(figure.title)}</title>{described}\n<rect '
        f'width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


class _Scale(NamedTuple):
    """An axis with its range, in the units of `number`."""

    axis: Axis
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float | str | None]) -> _Scale:
        """Returns the scale that shows all values, with a margin."""
        if axis.kind == "category":
            return cls(axis, 0, max(1, len(axis.categories)))
        scale = cls(axis, 0, 1)
        numbers = [
            number
            for value in values
            if value is not None and (number := scale.number(value)) is not None
        ]
        if not numbers:
            return scale
        low, high = min(numbers), max(numbers)
        margin = 0.04 * (high - low) or (0.3 if axis.kind == "log" else abs(low) / 2 or 1)
        return cls(axis, low - margin, high + margin)

    def number(self, value: float | str) -> float | None:
        """Returns the place of a value, before it is scaled to pixels; None for one that the axis
        cannot show.
        """
        if self.axis.kind == "category":
            return self.axis.categories.index(str(value)) + 0.5
        number = float(value)
        if self.axis.kind == "log":
            return math.log10(number) if number > 0 else None
        return number

    def placed(self, begin: float, end: float) -> Callable[[float], float]:
        """Returns the function from a place to pixels."""
        return lambda place: begin + (place - self.low) / (self.high - self.low) * (end - begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns the places of ticks, and their labels."""
        if self.axis.kind == "category":
            return [(number + 0.5, text) for number, text in enumerate(self.axis.categories)]
        if self.axis.ticks:
            return [
                (place, _short(v)) for v in self.axis.ticks if (place := self.number(v)) is not None
            ]
        values = (
            _log_ticks(self.low, self.high)
            if self.axis.kind == "log"
            else _linear_ticks(self.low, self.high)
        )
        return [
            (place, _short(value)) for value in values if (place := self.number(value)) is not None
        ]


def _scale_of_cells(axis: Axis, values: Sequence[float | str]) -> _Scale:
    if axis.kind == "category":
        return _Scale.of(axis, values)
    numbers = [float(value) for value in values]
    half = (numbers[-1] - numbers[0]) / (len(numbers) - 1) / 2 if len(numbers) > 1 else 0.5
    return _Scale(axis, numbers[0] - half, numbers[-1] + half)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten, with their halves and fifths over a short range, or round values
    within a decade.
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        apart = 1 if len(factors) > 1 else -(-len(decades) // 7)
        ticks = [factor * 10.0**power for power in decades[::apart] for factor in factors]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(ticks) >= 4:
            return ticks
    return (
        ticks
        if len(ticks) >= 3
        else [tick for tick in _linear_ticks(10**low, 10**high) if tick > 0]
    )


def _short(value: float) -> str:
    """Returns a number as a label: 40k, 1.5M, 0.001, 3e-05."""
    size, suffix = next(
        ((size, suffix) for size, suffix in _SUFFIXES if abs(value) >= size), (1.0, "")
    )
    if abs(value) < 1e4 or abs(value) >= 1e15:
        size, suffix = 1.0, ""
    return f"{value / size:.6g}".replace("-", "\N{MINUS SIGN}") + suffix


def _extents(series: Series) -> Iterator[float | None]:
    """Yields the values of a series, with the ends of their bars."""
    for index, value in enumerate(series.y):
        error = (series.errors[index] if series.errors else None) or 0
        yield from () if value is None else (value - error, value + error)


def _axis_x(
    ticks: Sequence[tuple[float, str]],
    at: Callable[[float], float],
    left: float,
    right: float,
    top: float,
    bottom: float,
    is_turned: bool,
) -> Iterator[str]:
    """Yields the ticks, grid and labels of the x axis; a label that would lie over the one before
    it is left out.
    """
    end = -math.inf
    for place, label in ticks:
        x = at(place)
        if not left - 1 <= x <= right + 1:
            continue
        yield f'<path d="M{x:.1f} {top}V{bottom:.1f}" stroke="{_GRID}"/>'
        yield f'<path d="M{x:.1f} {bottom:.1f}v{_TICK}" stroke="{_TEXT}"/>'
        half = len(label) * _CHARACTER / 2
        if is_turned:
            turn = f' transform="rotate(-35 {x:.1f} {bottom + 16:.1f})"'
            yield _text(x + 4, bottom + 16, label, "end", more=turn)
        elif x - half > end + 4:
            end = x + half
            yield _text(x, bottom + 19, label)


def _axis_y(
    ticks: Sequence[tuple[float, str]],
    at: Callable[[float], float],
    left: float,
    right: float,
    bottom: float,
) -> Iterator[str]:
    end = math.inf
    for place, label in ticks:
        y = at(place)
        if y > bottom + 1 or y < _TOP - 4:
            continue
        yield f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{_GRID}"/>'
        yield f'<path d="M{left:.1f} {y:.1f}h-{_TICK}" stroke="{_TEXT}"/>'
        if y + _FONT <= end:
            end = y
            yield _text(left - _TICK - 4, y + 4.5, label, "end")


def _drawn(
    series: Series,
    x: _Scale,
    y: _Scale,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
) -> Iterator[str]:
    """Yields the line of a series, its bars and its markers."""

    def point(x_value: float | str, y_value: float | None) -> tuple[float, float] | None:
        if y_value is None:
            return None
        places = x.number(x_value), y.number(y_value)
        return None if None in places else (at_x(places[0] or 0), at_y(places[1] or 0))

    points = [point(*pair) for pair in zip(series.x, series.y, strict=True)]
    if series.style in _LINES:
        look = f'fill="none" stroke="{series.colour}" stroke-width="1.8" stroke-linejoin="round"'
        yield f'<path d="{_path(points, series.style == "stairs")}" {look}{_LINES[series.style]}/>'
    for (x_value, value), error in zip(
        zip(series.x, series.y, strict=True), series.errors, strict=False
    ):
        if value is None or not error:
            continue
        low, high = point(x_value, value - error), point(x_value, value + error)
        if low and high:
            (x0, y0), (_, y1) = low, high
            bar = f"M{x0:.1f} {y0:.1f}V{y1:.1f}M{x0 - 4:.1f} {y0:.1f}h8M{x0 - 4:.1f} {y1:.1f}h8"
            yield f'<path class="error" d="{bar}" stroke="{series.colour}" stroke-width="1.5"/>'
    for place in points:
        if place and (series.style not in _LINES or series.style in _DOTS or len(series.x) == 1):
            yield _marker(series, *place)


def _path(points: Sequence[tuple[float, float] | None], is_stairs: bool) -> str:
    """Returns the line through points, with a gap at each that is missing."""
    steps, before = [], None
    for place in points:
        if place:
            at = f"{place[0]:.1f} {place[1]:.1f}"
            steps.append(
                f"M{at}"
                if before is None
                else f"V{place[1]:.1f}H{place[0]:.1f}"
                if is_stairs
                else f"L{at}"
            )
        before = place
    return "".join(steps)


def _marker(series: Series, x: float, y: float) -> str:
    if series.style == "rings":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="{series.colour}" '
            'stroke-width="2"/>'
        )
    if series.style in _SHAPES:
        corners = "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in _SHAPES[series.style])
        return f'<path d="M{corners}Z" fill="{series.colour}" stroke="{_TEXT}"/>'
    if series.style == "points":
        diamond = f"M{x:.1f} {y - 6:.1f}l5 6l-5 6l-5 -6z"
        return f'<path d="{diamond}" fill="{series.colour}" stroke="{_TEXT}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{series.colour}"/>'


def _legend_lines(series: Sequence[Series]) -> list[list[Series]]:
    """Returns the series of each line of the legend."""
    lines: list[list[Series]] = []
    width = math.inf
    for entry in series:
        needed = _entry_width(entry)
        if width + needed > _WIDTH - 90:
            lines, width = [*lines, []], 0
        lines[-1].append(entry)
        width += needed
    return lines


def _entry_width(series: Series) -> float:
    return 40 + _CHARACTER * len(series.name)


def _legend(lines: Sequence[Sequence[Series]], left: float) -> Iterator[str]:
    for number, line in enumerate(lines):
        x, y = left, _TOP + _LINE * number + 4
        for series in line:
            if series.style in _LINES:
                look = f'stroke="{series.colour}" stroke-width="1.8"{_LINES[series.style]}'
                yield f'<path d="M{x:.1f} {y}h22" {look}/>'
            if series.style not in _LINES or series.style in _DOTS:
                yield _marker(series, x + 11, y)
            yield _text(x + 28, y + 4.5, series.name, "start")
            x += _entry_width(series)


def _cells(
    heat_map: HeatMap,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    right: float,
    top: float,
    bottom: float,
) -> Iterator[str]:
    """Yields the cells of a grid, with their values if it has numbers, and the scale of the
    colours.
    """
    values = [value for row in heat_map.values_YxX for value in row if value is not None]
    if not values:
        return
    is_loads = heat_map.palette == "loads"
    low, high = (0.0, 2.0) if is_loads else (min(values), max(values))
    palette = _RED_BLUE if is_loads else _VIRIDIS[::-1]
    numbers = (
        [float(x) for x in heat_map.x] if heat_map.x and not isinstance(heat_map.x[0], str) else []
    )
    half = (numbers[-1] - numbers[0]) / (len(numbers) - 1) / 2 if len(numbers) > 1 else 0.5
    places = numbers or [index + 0.5 for index in range(len(heat_map.x))]
    for row, of_row in enumerate(heat_map.values_YxX):
        y, height = at_y(row + 1), at_y(row) - at_y(row + 1)
        for place, value in zip(places, of_row, strict=True):
            if value is None:
                continue
            x, width = at_x(place - half), at_x(place + half) - at_x(place - half)
            fill = _shade(palette, (value - low) / (high - low or 1))
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width + 0.2:.1f}" '
                f'height="{height + 0.2:.1f}" fill="{fill}"/>'
            )
            if heat_map.has_numbers and width > 6 * _CHARACTER:
                ink = "#ffffff" if value > (low + high) / 2 else _TEXT
                yield _text(
                    x + width / 2, y + height / 2 + 4.5, f"{value:.4g}", more=f' style="fill:{ink}"'
                )
    each = (bottom - top) / _BAR_STEPS
    for step in range(_BAR_STEPS):
        fill = _shade(palette, (step + 0.5) / _BAR_STEPS)
        yield (
            f'<rect x="{right + 14:.1f}" y="{bottom - (step + 1) * each:.1f}" width="{_BAR_WIDTH}" '
            f'height="{each + 0.3:.2f}" fill="{fill}"/>'
        )
    for share in (0, 0.5, 1):
        label = f"{low + share * (high - low):.3g}"
        yield _text(
            right + 14 + _BAR_WIDTH + 4, bottom - share * (bottom - top) + 4.5, label, "start"
        )
    yield _text(right + 21, top - 10, heat_map.name)


def _shade(palette: Sequence[str], share: float) -> str:
    """Returns the colour of a palette at a share from 0 to 1 of it, between its colours."""
    place = min(1, max(0, share)) * (len(palette) - 1)
    index = min(int(place), len(palette) - 2)
    two = [
        [int(text[begin : begin + 2], 16) for begin in (1, 3, 5)]
        for text in palette[index : index + 2]
    ]
    mixed = (round(a + (b - a) * (place - index)) for a, b in zip(*two, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(
    x: float, y: float, text: str, anchor: str = "middle", size: int = _FONT, more: str = ""
) -> str:
    sized = f' font-size="{size}"' if size != _FONT else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{sized}{more}>{_escaped(text)}</text>'
    )


def _escaped(text: str) -> str:
    """Returns a text for XML, which has no control characters."""
    return html.escape("".join(c if c.isprintable() else " " for c in text), quote=False)
