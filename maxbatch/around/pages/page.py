"""An HTML page of sections and figures, written as one self-contained file."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources

from maxbatch.around.pages.plots import Figure, Panel, RunColumns, colour
from maxbatch.around.pages.svg import figure_of, file_names, svg_of
from maxbatch.system.errors import ConfigError, TrainingError, writing
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.folding import counted

AXES = ("steps", "samples", "tokens", "time")


# A page is self-contained; nothing in it may load or send anything.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; base-uri 'none'; form-action 'none'"
)
_LONG = 60  # characters of a text that a table may fold


class Page:
    """A page; its parts appear in the order in which they are added."""

    def __init__(self, title: str, reloads_s: int = 0) -> None:
        """Begins a page; with `reloads_s` above 0 it reloads itself at that interval, in
        seconds.
        """
        self._title, self._reloads_s = title, reloads_s
        self._body: list[str] = []
        self._figures: list[dict[str, object]] = []
        self._drawn: list[Figure | Panel] = []
        self._units: dict[str, str] = {}
        self._runs: list[RunColumns] = []

    def add(self, *blocks: str) -> None:
        """Adds parts as HTML, from the functions below."""
        self._body += blocks

    def figures(self, figures: Sequence[Figure]) -> None:
        """Adds figures that hold their own data."""
        self._add(
            (
                figure,
                {
                    "x": figure.x._asdict(),
                    "y": figure.y._asdict(),
                    "series": [series._asdict() for series in figure.series],
                    "heatMap": figure.heat_map._asdict() if figure.heat_map else None,
                },
            )
            for figure in figures
        )

    def panels(
        self, panels: Sequence[Panel], runs: Sequence[RunColumns], units: dict[str, str]
    ) -> None:
        """Adds figures of runs, once per page, with buttons that select the x axis of `AXES`,
        labelled by `units`.

        A panel without a value of any run is left out.
        """
        self._runs, self._units = list(runs), units
        buttons = "".join(_button("axis", axis, axis, axis == AXES[0]) for axis in AXES)
        names = "".join(
            f"<span>{_swatch(i)}{html.escape(run.name)}</span>" for i, run in enumerate(runs)
        )
        names = f'<div class="names">{names}</div>' if len(runs) > 1 else ""
        slider = (
            '<input type="range" id="smoothing" min="0" max="10" value="0"><output>off</output>'
        )
        hint = '<span class="hint">drag to zoom, double-click to zoom out</span>'
        self._body.append(
            f'<nav class="axes">against {buttons}<label>smoothing '
            f"{slider}</label>{names}{hint}</nav>"
        )
        drawn = {panel: _lines(panel, runs) for panel in panels}
        self._add(
            [
                (
                    panel,
                    {
                        "units": units,
                        "unit": panel.unit,
                        "isLog": panel.is_log,
                        "areLarge": panel.are_large,
                        "smooths": panel.smooths,
                        "lines": lines,
                    },
                )
                for panel, lines in drawn.items()
                if lines
            ]
        )

    def _add(self, figures: Iterable[tuple[Figure | Panel, dict[str, object]]]) -> None:
        blocks = []
        for figure, spec in figures:
            number, log, note = len(self._figures), "", ""
            if isinstance(figure, Panel):
                log = _button("log", str(number), "log", figure.is_log)
            if figure.note:
                note = f"<figcaption>{html.escape(figure.note)}</figcaption>"
            plot = f'<div class="plot" id="plot{number}"></div>'
            blocks.append(f"<figure><h3>{html.escape(figure.title)}{log}</h3>{plot}{note}</figure>")
            self._figures.append(spec)
            self._drawn.append(figure)
        self._body.append(f'<div class="figures">{"".join(blocks)}</div>')

    def save(self, path: AnyPath) -> str:
        """Writes the page if it can, and returns a line with its path, or with the reason why it
        was not written.
        """
        try:
            self.write(path)
        except (ConfigError, TrainingError) as error:
            return f"plot: not written ({error})"
        return f"plot: {path}"

    def write(self, path: AnyPath) -> None:
        """Writes the page.

        Raises:
          ConfigError: bokeh is not installed, or the file cannot be written.
          TrainingError: the disk is full.
        """
        write_atomically(path, self._html())

    def write_svg(self, folder: AnyPath) -> str:
        """Writes each plot as an SVG file, named after its title, and returns a line that counts
        them.

        Raises:
          ConfigError: the folder, or a file in it, cannot be written.
          TrainingError: the disk is full.
        """
        figures = [
            figure_of(drawn, self._runs, self._units[AXES[0]])
            if isinstance(drawn, Panel)
            else drawn
            for drawn in self._drawn
        ]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, figure in zip(
            file_names([figure.title for figure in figures]), figures, strict=True
        ):
            write_atomically(folder / name, svg_of(figure))
        return f"svg: {counted(len(figures), 'plot')} in {folder}"

    def _html(self) -> str:
        runs = [
            {"name": run.name, "colour": colour(i), "axes": run.axes, "columns": run.columns}
            for i, run in enumerate(self._runs)
        ]
        data = json.dumps(
            {"runs": runs, "figures": self._figures}, allow_nan=False, separators=(",", ":")
        )
        # a page of text alone needs no scripts; "<" inside a text cannot end one
        scripts = (
            ""
            if not self._figures
            else (
                f'\n<script id="bokeh" type="text/plain">{packed_bokeh()}</script>\n'
                '<script id="page-data" '
                f'type="application/json">{data.replace("<", chr(92) + "u003c")}</script>\n'
                f"<script>{_asset('page.js')}</script>"
            )
        )
        title = html.escape(self._title)
        reload = (
            f'<meta http-equiv="refresh" content="{self._reloads_s}">' if self._reloads_s else ""
        )
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{reload}'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<style>{_asset('page.css')}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self._body)
            + scripts
            + "\n</body></html>\n"
        )


def packed_bokeh() -> str:
    """Returns BokehJS for embedding, as base64 of gzip: 0.5 MB instead of 1.4 MB."""
    try:
        top = resources.files("bokeh")
    except ImportError:
        raise ConfigError("plots need bokeh; works: pip install 'maxbatch[report]'") from None
    scripts = [top / f"server/static/js/{name}.min.js" for name in ("bokeh", "bokeh-api")]
    return _packed(b"\n".join(script.read_bytes() for script in scripts))


@functools.cache
def _packed(scripts: bytes) -> str:
    return base64.b64encode(gzip.compress(scripts, mtime=0)).decode()


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def details(summary: str, *blocks: str, is_open: bool = False) -> str:
    """Returns parts that fold under a summary."""
    attribute = " open" if is_open else ""
    return (
        f"<details{attribute}><summary>{html.escape(summary)}</summary>{''.join(blocks)}</details>"
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    has_swatches: bool = False,
    marked: int | None = None,
) -> str:
    """Returns a table, optionally with the colour of its run before each row; highlights the row
    `marked`.

    Whole numbers get thousands separators, None is a dash.
    """
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = []
    for index, row in enumerate(rows):
        cells = [_cell(value) for value in row]
        if has_swatches:
            cells[0] = cells[0].replace(">", f">{_swatch(index)}", 1)
        body.append(f"<tr{' class=best' if index == marked else ''}>{''.join(cells)}</tr>")
    return (
        "<div "
        f'class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def coloured(parts: Sequence[tuple[str, float | None]], most: float) -> str:
    """Returns a text whose parts are redder the greater their number is, which shows above them.

    Args:
      parts: texts, each with its number; None: it has none.
      most: the number of the reddest part.
    """
    spans = []
    for text, value in parts:
        shown = html.escape(text)
        if value is not None:
            share = min(1.0, max(0.0, value / most)) if most > 0 else 0.0
            style = f"background:rgba(220,50,50,{share:.2f})"
            shown = f'<span style="{style}" title="{value:.4g}">{shown}</span>'
        spans.append(shown)
    style = "white-space:pre-wrap;overflow-wrap:anywhere"
    return f'<pre style="{style}">{"".join(spans)}</pre>'


def shares_bar(shares: Sequence[tuple[str, float]]) -> str:
    """Returns a bar whose segments are the shares of named amounts, and a legend with the shares in
    per cent.
    """
    total = sum(amount for _, amount in shares)
    shown = [
        (i, html.escape(name), amount / total)
        for i, (name, amount) in enumerate(shares)
        if amount > 0
    ]
    segments = "".join(
        f'<i style="width:{share:.4%};background:{colour(i)}" title="{name} {share:.1%}"></i>'
        for i, name, share in shown
    )
    legend = "".join(f"<span>{_swatch(i)}{name} {share:.1%}</span>" for i, name, share in shown)
    return f'<div class="shares">{segments}</div><p class="legend">{legend}</p>'


def _button(kind: str, value: str, text: str, is_pressed: bool) -> str:
    return f'<button data-{kind}="{value}" aria-pressed="{str(is_pressed).lower()}">{text}</button>'


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:{colour(index)}"></i>'


def _cell(value: object) -> str:
    if value is None:
        return '<td class="number">–</td>'
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        is_long = len(text) > _LONG or "\n" in text
        return f"<td{' class=long' if is_long else ''}>{html.escape(text)}</td>"
    is_large = isinstance(value, int) or abs(value) >= 1000
    return f'<td class="number">{f"{value:,.0f}" if is_large else f"{value:.5g}"}</td>'


def _lines(panel: Panel, runs: Sequence[RunColumns]) -> list[dict[str, object]]:
    return [
        {"run": index, "column": column, "style": style}
        for index, run in enumerate(runs)
        for column, style in panel.lines
        if any(value is not None for value in run.columns.get(column, ()))
    ]


def _asset(name: str) -> str:
    return resources.files("maxbatch.around.pages").joinpath(name).read_text(encoding="utf-8")
