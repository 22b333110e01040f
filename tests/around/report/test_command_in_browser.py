"""Reports in headless Chromium: no console error, exact values, each step once, light and dark."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from maxbatch.around.pages.page import AXES, Page
from maxbatch.around.pages.plots import Axis, Figure, Series, heat_map, loss_against_batch
from maxbatch.cli import main
from maxbatch.commands.report import make_page
from maxbatch.run.folder.run_folder import SESSIONS_FILE
from maxbatch.run.folder.sessions import Session, TimePart
from tests.helpers.chromium import ask
from tests.helpers.command import Hold, maxbatch, recorded, start
from tests.helpers.processes import wait_for
from tests.helpers.reports import CURVES, TRIALS, make_sweep, write_run
from tests.helpers.tiny import TINY_RUN, read_metrics

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'maxbatch[report]')")


LINES_OF_PLOTS = """
const plots = [...document.querySelectorAll(".plot")];
const lines = plots.flatMap(({ series }) => series.map(({ run, column, x, y }) => ({ run, column, x, y })));
"""
# Points at the last point of every line and reads the tooltip.
HOVER = """
const shown = [], mouse = { pointerType: "mouse", isPrimary: true };
for (const { series, view, plot } of document.querySelectorAll(".plot")) {
  const points = view.views.find_one(plot.renderers.at(-1)).glyph;
  const area = view.canvas_view.events_el;
  let end = -1;
  for (const { column, y } of series) {
    end += y.filter((value) => value !== null).length;
    const { left, top } = area.getBoundingClientRect();
    const place = { clientX: left + points.sx[end], clientY: top + points.sy[end], ...mouse };
    for (const kind of ["pointerover", "pointermove"]) area.dispatchEvent(new PointerEvent(kind, place));
    await new Promise((next) => setTimeout(next, 200));
    const tips = [...document.querySelectorAll(".bk-Tooltip")].map(({ shadowRoot }) => shadowRoot.querySelector("b"));
    shown.push({ column, text: tips.map((tip) => tip.parentNode.innerHTML.replace(/<[^>]*>/g, "\\n")).join("\\n") });
    area.dispatchEvent(new PointerEvent("pointerout", place));
  }
}
"""


@pytest.mark.runs
def test_a_page_with_every_kind_of_figure_opens_without_a_console_error() -> None:
    records = write_run(
        Path("a"),
        30,
        eval_loss=lambda step: 1 / step if step % 10 == 0 else ...,
        gradient_noise_scale=lambda step: 50.0 + step,
        critical_batch_estimate=lambda step: 60.0,
        loss=lambda step: None if step == 7 else 1 / step,
        skipped=lambda step: step in (7, 9),
        skip_reason={7: "non-finite", 9: "spike"}.get,
        stream_position=lambda step: 16 * step + (8 if step > 10 else 0),
    )
    make_sweep()
    page = make_page([Path("a"), Path("sw")])
    page.figures(
        [
            loss_against_batch(CURVES),
            heat_map(("global_batch_size", "learning_rate"), "loss", TRIALS),
        ]
    )
    page.write(Path("page.html"))
    for dark in (False, True):
        script = LINES_OF_PLOTS + "return [lines, getComputedStyle(document.body).backgroundColor]"
        (answer, back), console = ask(Path("page.html").resolve(), script, dark)
        assert console == []
        assert back == ("rgb(18, 21, 28)" if dark else "rgb(255, 255, 255)")
    drawn = {(line["run"], line["column"]): line for line in answer if "run" in line}
    assert drawn["a", "loss"]["x"] == [record["step"] for record in records] == list(range(1, 31))
    assert drawn["a", "loss"]["y"] == [record["loss"] for record in records]
    evals = zip(drawn["a", "eval_loss"]["x"], drawn["a", "eval_loss"]["y"], strict=True)
    assert [at for at in evals if at[1] is not None] == [(10, 0.1), (20, 0.05), (30, 1 / 30)]
    for mark, step in (("not finite", 7), ("spike", 9), ("hole", 11)):
        assert (
            drawn["a", mark]["x"][[y is not None for y in drawn["a", mark]["y"]].index(True)]
            == step
        )


def test_a_browser_that_cannot_unpack_the_plots_says_so() -> None:
    write_run(Path("a"), 3)
    make_page([Path("a")]).write(Path("page.html"))
    Path("old.html").write_text(
        Path("page.html")
        .read_text()
        .replace("<head>", "<head><script>delete window.DecompressionStream</script>")
    )
    shown, console = ask(
        Path("old.html").resolve(),
        'return [...document.querySelectorAll(".plot")].map((plot) => plot.textContent)',
    )
    assert console == [] and set(shown) == {"Plots need a browser of 2023 or newer."}


@pytest.mark.runs
def test_hovering_shows_the_exact_values_of_metrics() -> None:
    records = write_run(Path("a"), 12, eval_loss=lambda step: 1 / 3 if step == 12 else ...)
    make_page([Path("a")]).write(Path("page.html"))
    shown, console = ask(Path("page.html").resolve(), HOVER + "return shown")
    assert console == []
    texts = {one["column"]: one["text"] for one in shown}
    last = records[-1]
    for column in (
        "loss",
        "eval_loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "step_time_s",
    ):
        name, value = re.search(rf"({column}) (\S+)", texts[column]).groups()  # type: ignore[union-attr]
        assert float(value) == last[name]
        assert "step 12 · 192 samples · 6,144 tokens · 3 s" in texts[column]


@pytest.mark.runs
def test_the_x_axis_can_be_steps_samples_tokens_or_time_and_zoom_goes_along() -> None:
    records = write_run(Path("a"), 12)
    make_page([Path("a")]).write(Path("page.html"))
    script = """
    const seen = {};
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.click();
      await new Promise((next) => setTimeout(next, 200));
      seen[button.dataset.axis] = document.getElementById("plot0").series[0].x;
    }
    const plots = [...document.querySelectorAll(".plot")];
    const ranges = () => plots.map(({ plot: { x_range: { start, end } } }) => [start, end]);
    const whole = ranges(), tops = () => plots.map(({ plot }) => plot.y_range.end), before = tops();
    const area = plots[0].view.canvas_view.events_el;
    const { left, top } = area.getBoundingClientRect();
    const at = (x) => left + plots[0].view.frame.x_scale.compute(x);
    const move = (kind, x) => area.dispatchEvent(new PointerEvent(kind, {
      clientX: at(x), clientY: top + 100, pointerType: "mouse", isPrimary: true, buttons: 1,
    }));
    area.setPointerCapture = () => {}; // no real pointer is down
    move("pointerdown", 1);
    for (const x of [1.5, 2]) move("pointermove", x);
    move("pointerup", 2);
    await new Promise((next) => setTimeout(next, 500));
    const zoomed = ranges(), after = tops();
    plots[1].plot.trigger_event({ event_name: "doubletap" });
    await new Promise((next) => setTimeout(next, 500));
    return { seen, whole, zoomed, again: ranges(), before, after };
    """
    answer, console = ask(Path("page.html").resolve(), script)
    assert console == [] and list(answer["seen"]) == list(AXES)
    assert answer["seen"]["tokens"] == [record["tokens_seen"] for record in records]
    assert answer["seen"]["samples"] == [record["samples_seen"] for record in records]
    assert answer["seen"]["time"] == [0.25 * step for step in range(1, 13)]
    assert all(zoom == pytest.approx([1, 2], abs=0.02) for zoom in answer["zoomed"])
    assert answer["again"] == answer["whole"]
    assert answer["after"][0] < answer["before"][0], (
        "the y axis fits what is shown of a falling loss"
    )


@pytest.mark.runs
def test_an_axis_of_a_constant_is_of_its_size() -> None:
    write_run(Path("a"), 12, learning_rate=lambda _: 0.003)
    make_page([Path("a")]).write(Path("page.html"))
    script = """
    const plots = [...document.querySelectorAll(".plot")];
    const { y_range: { start, end } } = plots.find(({ series }) => series[0].column === "learning_rate").plot;
    return [start, end];
    """
    (low, high), console = ask(Path("page.html").resolve(), script)
    assert console == [] and 0 < low < 0.003 < high < 0.006


@pytest.mark.runs
def test_the_slider_smooths_rates_and_leaves_their_values_below() -> None:
    records = write_run(Path("a"), 12, loss=lambda step: float(step))
    make_page([Path("a")]).write(Path("page.html"))
    move = (
        'const s = document.getElementById("smoothing"); s.value = 2; s.dispatchEvent(new '
        'Event("input"));'
    )
    wait = "await new Promise((next) => setTimeout(next, 500));"
    (lines, said), console = ask(
        Path("page.html").resolve(),
        move + wait + LINES_OF_PLOTS + "return [lines, s.nextElementSibling.value]",
    )
    assert console == [] and said == "mean of 3"
    over = [line["y"] for line in lines if line["column"] == "loss"]
    assert over[0] == [float(r["step"]) for r in records]
    assert over[1] == [1.0, 1.5, *(float(step - 1) for step in range(3, 13))]
    assert sum(line["column"] == "learning_rate" for line in lines) == 1
    assert sum(line["column"] == "tokens_per_second" for line in lines) == 2


@pytest.mark.runs
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_a_narrow_screen_and_no_number_is_torn(width: int) -> None:
    write_run(
        Path("a"),
        30,
        stage=lambda step: step // 10,
        tokens_per_second=lambda step: 1234567.0 * step,
    )
    write_run(Path("a-run-with-a-rather-long-name-of-its-own"), 3)
    make_sweep()
    make_page([Path("a"), Path("a-run-with-a-rather-long-name-of-its-own"), Path("sw")]).write(
        Path("page.html")
    )
    script = """
    document.body.style.width = "%dpx"; document.body.style.margin = "0";
    await new Promise((next) => setTimeout(next, 500));
    const torn = [...document.querySelectorAll("td.number")].filter((td) => td.getClientRects().length &&
      td.getBoundingClientRect().height > 2.5 * parseFloat(getComputedStyle(td).fontSize));
    const parts = [...document.body.children].filter((part) => part.textContent);
    const wide = parts.filter((part) => part.getBoundingClientRect().right > %d + 1);
    return [torn.map((td) => td.textContent), wide.map((part) => part.outerHTML.slice(0, 80))];
    """
    (torn, wide), console = ask(Path("page.html").resolve(), script % (width, width))
    assert (torn, wide, console) == ([], [], [])


@pytest.mark.runs
def test_ticks_are_plain_numbers_and_a_table_of_sessions_fits_a_tablet() -> None:
    write_run(Path("a"), 30)
    parts = {part.value: 0.0 for part in TimePart} | {
        "updates_kept": 39000.0,
        "since_session_before": 14400.0,
    }
    sessions = [
        Session(1.7e9 + 1e5 * i, 1.7e9 + 1e5 * i + 39000, 4, 128, 30 * i + 1, 30 * i + 30, parts)
        for i in (0, 1)
    ]
    (Path("a") / SESSIONS_FILE).write_text(
        "".join(json.dumps(session.to_json()) + "\n" for session in sessions)
    )
    page = make_page([Path("a")])
    rates = [2e-7, 1e-5, 1e-4, 1e-3, 0.03]
    page.figures(
        [
            Figure(
                "sampled",
                Axis("rate", "log"),
                Axis("loss"),
                (Series("", "dots", "#123456", rates, [3.0, 2.9, 2.8, 2.9, 3.1], [""] * 5),),
            )
        ]
    )
    page.write(Path("page.html"))
    script = """
    const plots = [...document.querySelectorAll(".plot")].map((box) => box.plot);
    const axis = plots[plots.length - 1].below[0];
    const scrolling = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1);
    const ticks = axis.formatter.doFormat([1e-7, 1e-4, 0.1, 0.30000000000000004, 2], { loc: 0 });
    return [ticks, scrolling.map((box) => box.textContent), document.documentElement.scrollWidth <= innerWidth];
    """
    found, console = ask(Path("page.html").resolve(), script, width=800)
    assert (found, console) == ([["1e\u22127", "0.0001", "0.1", "0.3", "2"], [], True], [])


@pytest.mark.runs
def test_the_browser_test_would_see_an_error() -> None:
    page = Page("broken")
    page.write(Path("page.html"))
    text = (
        Path("page.html")
        .read_text()
        .replace("<h1>", "<script>console.error('broken')</script><h1>")
    )
    Path("page.html").write_text(text)
    assert any("broken" in line for line in ask(Path("page.html").resolve(), "return 1")[1])


@pytest.mark.processes
def test_a_ramped_killed_and_resumed_run_shows_each_step_once() -> None:
    ramp = (
        *TINY_RUN,
        "run_dir=run",
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "per_device_batch_size=6",
        "gradient_accumulation_steps=3",
        "global_rampup_samples=120",
        "train_samples=220",
        "checkpoint_period=4",
    )
    process = start("train", *ramp, **Hold(8, Path.cwd()).variables)
    wait_for(lambda: recorded(Path("run")) >= 8, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = maxbatch("train", *ramp)
    assert done.returncode == 0 and "resumed at step" in done.stdout, done.stderr
    assert main(["report", "run"]) == 0
    records = read_metrics("run")
    lines, console = ask(Path("run/report.html").resolve(), LINES_OF_PLOTS + "return lines")
    assert console == []
    drawn = {line["column"]: line for line in lines}
    for column in (
        "loss",
        "global_batch_size",
        "learning_rate",
        "tokens_per_second",
        "step_time_s",
        "grad_norm",
    ):
        assert drawn[column]["x"] == list(range(1, len(records) + 1))
        left_out = 2 if column == "tokens_per_second" else 0  # the first updates
        assert drawn[column]["y"] == [None] * left_out + [
            record[column] for record in records[left_out:]
        ]
    assert sorted(set(drawn["global_batch_size"]["y"][:-1])) == [6, 12, 18]
