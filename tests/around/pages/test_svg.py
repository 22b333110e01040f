"""`--svg`: every plot of a page as one SVG file, drawn without a browser."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from maxbatch.around.pages.critical_batch_section import add_critical_batch
from maxbatch.around.pages.page import Page
from maxbatch.around.pages.plots import (
    Axis,
    Figure,
    Panel,
    RunColumns,
    Series,
    heat_map,
    loads_over_time,
    loss_against_batch,
)
from maxbatch.around.pages.svg import figure_of, file_names, svg_of
from maxbatch.cli import main
from tests.helpers.reports import CURVES, TRIALS, make_sweep, write_run

_TAG = "{http://www.w3.org/2000/svg}"


def read(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_bytes())  # raises for what is no XML


def texts_of(svg: ElementTree.Element) -> list[str]:
    return [str(element.text) for element in svg.iter(f"{_TAG}text")]


def drawn(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(svg_of(figure).encode())


def test_a_report_writes_one_svg_for_each_plot_with_its_labels_and_legend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choices = {
        "expert_choices": lambda step: {"0": 3, "1": 5},
        "eval_loss": lambda step: 3.5 if step == 20 else ...,
    }
    for name in ("a", "b <&>"):
        write_run(Path(name), 40, **choices)
    assert main(["report", "a", "b <&>", "--svg", "plots/of runs", "--output", "page.html"]) == 0
    files = sorted(Path("plots/of runs").iterdir())
    assert f"{len(files)} plots in plots/of runs" in capsys.readouterr().err
    page = Path("page.html").read_text()
    assert len(files) == len(re.findall('class="plot"', page)) > 4
    texts = {path.name: texts_of(read(path)) for path in files}
    assert {"updates", "loss per token (nats)", "a", "b <&>", "40"} <= set(texts["loss.svg"])
    assert {"updates", "samples per update"} <= set(texts["global-batch.svg"])
    assert {"updates", "expert", "load", "0", "1", "2"} <= set(texts["a-load-of-each-expert.svg"])
    assert main(["report", "a", "--json", "--svg", "one"]) == 0
    assert {"loss", "smoothed loss", "eval loss"} <= set(texts_of(read(Path("one/loss.svg"))))
    assert not Path("a/report.html").exists()


def test_plots_of_a_sweep_are_drawn_without_bokeh(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sweep()
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["report", "sw", "--json", "--svg", "plots"]) == 0
    svg = read(Path("plots/loss-against-learning-rate.svg"))
    assert {"learning_rate", "loss", "0.001", "0.01"} <= set(texts_of(svg))
    assert len(list(svg.iter(f"{_TAG}circle"))) == 2, "one for each trial that is done"


def test_a_critical_batch_has_its_bars_rings_and_tolerances(tmp_path: Path) -> None:
    branches = [
        {
            "batch_size": size,
            "learning_rate": 1e-3,
            "updates": 4,
            "loss": loss,
            "difference": 0.0,
            "standard_error": e,
        }
        for size, loss, e in ((8, 3.0, None), (16, 3.01, 0.05), (32, 3.2, 0.05))
    ]
    checkpoint = {
        "step": 100,
        "samples_seen": 800,
        "batch_size": 8,
        "is_below_base": False,
        "in_words": "",
        "critical_batch_size": 16,
        "branches": branches,
    }
    page = Page("critical")
    add_critical_batch(
        page,
        {
            "run": "r",
            "tolerance": 0.05,
            "tolerance_unit": "nats",
            "command": "c",
            "checkpoints": [checkpoint, {**checkpoint, "step": 400}],
        },
    )
    assert page.write_svg(tmp_path / "plots") == f"svg: 1 plot in {tmp_path}/plots"
    svg = read(tmp_path / "plots" / "loss-against-batch-size.svg")
    assert {"samples per update", "smoothed loss", "step 100", "step 400", "8", "16", "32"} <= set(
        texts_of(svg)
    )
    assert len([p for p in svg.iter(f"{_TAG}path") if p.get("class") == "error"]) == 2 * 2
    assert len([c for c in svg.iter(f"{_TAG}circle") if c.get("r") == "8"]) == 2
    assert len([p for p in svg.iter(f"{_TAG}path") if p.get("stroke-dasharray")]) == 2
    assert "one standard error" in str(svg.findtext(f"{_TAG}desc"))


def test_everything_is_inside_of_the_picture() -> None:
    line = Series("a", "line", "#000000", [1, 2, 3], [1e-5, None, 5e7], ())
    flat = Series("a rather long name of a run", "stairs", "#000000", [5], [0.25], ())
    figures = [
        loss_against_batch(CURVES),
        heat_map(("global_batch_size", "learning_rate"), "loss", TRIALS),
        loads_over_time("loads", [1], [{"0": 1, "1": 2}]),
        Figure("log", Axis("x", "log"), Axis("y", "log"), (line,) * 12),
        Figure("flat", Axis("x"), Axis("y"), (flat, flat)),
        Figure(
            "words",
            Axis("x", "category", (), tuple(f"one of many {i}" for i in range(9))),
            Axis("y"),
            (Series("", "dots", "#000000", ["one of many 3"], [-2.0], ()),),
        ),
        Figure(
            "nothing",
            Axis("x"),
            Axis("y", "log"),
            (Series("", "line", "#000000", [1], [-1.0], ()),),
        ),
    ]
    for figure in figures:
        svg = drawn(figure)
        for name, most in (("x", 640), ("cx", 640), ("y", 400), ("cy", 400)):
            places = [float(value) for element in svg.iter() if (value := element.get(name))]
            assert all(0 <= place <= most for place in places), (figure.title, name)
        for path in svg.iter(f"{_TAG}path"):
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", str(path.get("d"))):
                assert 0 <= float(x) <= 640 and 0 <= float(y) <= 400, figure.title
        assert {figure.x.title, figure.y.title, figure.title} <= set(texts_of(svg))


def test_a_missing_value_is_a_gap_and_stairs_change_before_their_value() -> None:
    def path(style: str, values: list[float | None]) -> str:
        figure = Figure(
            "", Axis(""), Axis(""), (Series("", style, "#123456", [1, 2, 3, 4], values, ()),)
        )
        return next(
            str(p.get("d"))
            for p in drawn(figure).iter(f"{_TAG}path")
            if p.get("stroke") == "#123456"
        )

    assert re.sub(r"[\d. ]", "", path("line", [1, None, 2, 3])) == "MML"
    assert re.sub(r"[\d. ]", "", path("stairs", [1, 2, 2, 3])) == "MVHVHVH"


def test_each_run_is_named_once_by_a_line_that_is_not_faint_if_it_has_one() -> None:
    runs = [RunColumns(name, {"steps": [1]}, {"a": [1.0], "b": [2.0]}) for name in ("one", "two")]
    both = figure_of(Panel("both", "", (("a", "faint"), ("b", "line"))), runs, "updates")
    assert [(line.name, line.style) for line in both.series if line.name] == [
        ("one", "line"),
        ("two", "line"),
    ]
    faint = figure_of(Panel("faint", "", (("a", "faint"), ("c", "line"))), runs, "updates")
    assert [line.name for line in faint.series] == ["one", "two"] and faint.y.title == "faint"


def test_no_two_plots_share_a_file() -> None:
    titles = ["Loss (faint), and more", "Loss", "loss, 2", "é", "a/../b"]
    assert file_names(titles) == ["loss.svg", "loss-2.svg", "loss-3.svg", "plot.svg", "a-b.svg"]


def test_a_folder_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("a"), 3)
    Path("file").touch()
    assert main(["report", "a", "--svg", "file"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("maxbatch: error: file: cannot be written") and error.count("\n") == 1
