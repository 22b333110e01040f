"""An HTML page of sections and figures, written as one file that needs nothing else."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from maxbatch.pages.plots import Figure, Panel, colour
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError, TrainingError

AXES = ("steps", "samples", "tokens", "time")


@dataclasses.dataclass(frozen=True)
class RunColumns:
    """The columns of a run that are drawn.

    Attributes:
      name: names the run on the page.
      axes: of each of `AXES`, its value at each drawn update.
      columns: of each drawn column, its value there as in `metrics.jsonl`; None where there is none.
    """

    name: str
    axes: dict[str, list[float]]
    columns: dict[str, list[float | None]]


class Page:
    """A page; sections appear in the order in which they are added.

    Args:
      title: of the document and at its top.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._body: list[str] = []
        self._figures: list[dict[str, Any]] = []
        self._runs: list[RunColumns] = []

    def heading(self, text: str) -> None:
        self._body.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._body.append(f"<p>{html.escape(text)}</p>")

    def table(
        self, heads: Sequence[str], rows: Iterable[Sequence[object]], swatches: Sequence[int] = ()
    ) -> None:
        """Adds a table; `swatches` are the colours, by index, before the first cell of each row."""
        self._body.append(_table(heads, rows, swatches))

    def details(self, summary: str, *parts: str, is_open: bool = False) -> None:
        """Adds parts, as HTML, that fold away under a summary."""
        attribute = " open" if is_open else ""
        self._body.append(
            f"<details{attribute}><summary>{html.escape(summary)}</summary>{''.join(parts)}</details>"
        )

    def figures(self, figures: Sequence[Figure]) -> None:
        """Adds figures that hold their own data."""
        self._add((figure, {"data": figure.data, "layout": figure.layout}) for figure in figures)

    def panels(self, panels: Sequence[Panel], runs: Sequence[RunColumns], units: dict[str, str]) -> None:
        """Adds figures of runs, with buttons for their x axis; a page takes them once.

        Args:
          panels: the figures; one without a value of any run is left out.
          runs: the runs, in the order of their colours.
          units: of each of `AXES`, its label.
        """
        self._runs = list(runs)
        buttons = "".join(
            f'<button data-axis="{axis}" aria-pressed="{str(axis == AXES[0]).lower()}">{axis}</button>'
            for axis in AXES
        )
        names = "".join(
            f"<span>{_swatch(i)}{html.escape(run.name)}</span>" for i, run in enumerate(runs) if len(runs) > 1
        )
        hint = '<span class="hint">drag to zoom, double-click to zoom out</span>'
        self._body.append(f'<nav class="axes">against {buttons}{names}{hint}</nav>')
        drawn = {panel: _lines(panel, runs) for panel in panels}
        self._add([
            (panel, {"units": units, "unit": panel.unit, "isLog": panel.is_log, "tickFormat": panel.tick_format,
                     "lines": lines})
            for panel, lines in drawn.items() if lines
        ])  # fmt: skip

    def _add(self, figures: Iterable[tuple[Figure | Panel, dict[str, Any]]]) -> None:
        parts = []
        for figure, spec in figures:
            number, log, note = len(self._figures), "", ""
            if isinstance(figure, Panel):
                pressed = str(figure.is_log).lower()
                log = f'<button data-log="{number}" aria-pressed="{pressed}">log</button>'
            elif figure.note:
                note = f"<figcaption>{html.escape(figure.note)}</figcaption>"
            plot = f'<div class="plot" id="plot{number}"></div>'
            parts.append(f"<figure><h3>{html.escape(figure.title)}{log}</h3>{plot}{note}</figure>")
            self._figures.append(spec)
        self._body.append(f'<div class="figures">{"".join(parts)}</div>')

    def save(self, path: Path) -> str:
        """Writes the page if it can, and returns a line that says where it is or why it was not written."""
        try:
            self.write(path)
        except (ConfigError, TrainingError) as error:
            return f"plot: not written ({error})"
        return f"plot: {path}"

    def write(self, path: Path) -> None:
        """Writes the page.

        Raises:
          ConfigError: plotly is not installed, or the file cannot be written.
          TrainingError: the disk is full.
        """
        write_atomically(path, self._html())

    def _html(self) -> str:
        runs = [
            {"name": run.name, "colour": colour(i), "axes": run.axes, "columns": run.columns}
            for i, run in enumerate(self._runs)
        ]
        data = json.dumps({"runs": runs, "figures": self._figures}, allow_nan=False, separators=(",", ":"))
        title = html.escape(self._title)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<style>{_asset('page.css')}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self._body)
            + f"\n<script>{plotly_js()}</script>\n"
            # "<" cannot end the script from inside a text
            + f'<script id="page-data" type="application/json">{data.replace("<", chr(92) + "u003c")}</script>\n'
            + f"<script>{_asset('page.js')}</script>\n</body></html>\n"
        )


def plotly_js() -> str:
    """Returns plotly.js, which a page carries inside.

    Raises:
      ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("plots need plotly; works: pip install 'maxbatch[report]'") from None
    return get_plotlyjs()


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as HTML; whole numbers get thousands separators, None is a dash."""
    return _table(heads, rows, ())


def paragraph(text: str) -> str:
    """Returns a paragraph as HTML."""
    return f"<p>{html.escape(text)}</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], swatches: Sequence[int]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = []
    for index, row in enumerate(rows):
        cells = [_cell(value) for value in row]
        if swatches:
            cells[0] = cells[0].replace(">", f">{_swatch(swatches[index])}", 1)
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:{colour(index)}"></i>'


def _cell(value: object) -> str:
    if value is None:
        return '<td class="number">–</td>'
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{html.escape(str(value))}</td>"
    is_large = isinstance(value, int) or abs(value) >= 1000
    return f'<td class="number">{f"{value:,.0f}" if is_large else f"{value:.5g}"}</td>'


def _lines(panel: Panel, runs: Sequence[RunColumns]) -> list[dict[str, Any]]:
    return [
        {"run": index, "column": column, "style": style}
        for index, run in enumerate(runs)
        for column, style in panel.lines
        if any(value is not None for value in run.columns.get(column, ()))
    ]


def _asset(name: str) -> str:
    return resources.files("maxbatch.pages").joinpath(name).read_text(encoding="utf-8")
