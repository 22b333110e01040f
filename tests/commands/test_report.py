"""`maxbatch report`: one page that needs no network and says what `metrics.jsonl` says."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maxbatch.around.pages.page import Page, packed_bokeh
from maxbatch.around.pages.plots import colour
from maxbatch.around.report.runs import COLUMNS, MOST_POINTS, PANELS, ReportedRun, fitted, smoothed
from maxbatch.cli import main
from maxbatch.commands import report as command
from maxbatch.commands.report import make_page, metrics_files
from maxbatch.run.folder.devices import DevicesUsed, record_devices
from maxbatch.run.folder.run_folder import SESSIONS_FILE
from maxbatch.run.folder.sessions import Session, TimePart
from tests.helpers.command import start
from tests.helpers.processes import wait_for
from tests.helpers.reports import make_sweep, write_run

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'maxbatch[report]')")


def page_data(path: Path) -> dict[str, Any]:
    found = re.search(
        r'<script id="page-data" type="application/json">(.*?)</script>',
        path.read_text(),
        re.DOTALL,
    )
    assert found
    return json.loads(found[1])


def test_the_page_needs_nothing_from_a_network(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert not re.search(
        r"<(script|link|img|iframe)[^>]*\b(src|href)\s*=\s*[\"']?(https?:|//)", text
    )
    packed = re.search(r'<script id="bokeh" type="text/plain">(.*?)</script>', text)
    assert packed and b"Bokeh" in gzip.decompress(base64.b64decode(packed[1]))


def test_the_page_of_a_small_run_has_less_than_a_megabyte() -> None:
    every = dict.fromkeys(COLUMNS, lambda step: step / 7)
    write_run(Path("run"), 300, **every)  # type: ignore[arg-type]
    make_page([Path("run")]).write(Path("page.html"))
    assert len(Path("page.html").read_bytes()) < 1_000_000


def test_the_page_lies_where_it_is_asked_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, 2)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "report.html\n" and Path("report.html").is_file()
    assert main(["report", str(tmp_path / "a"), "--output", "else.html"]) == 0
    assert Path("else.html").is_file() and not (tmp_path / "a" / "report.html").exists()


def test_a_report_without_bokeh_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("a"), 2)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["report", "a"]) == 2
    assert (
        "pip install 'maxbatch[report]'" in capsys.readouterr().err
        and not Path("a/report.html").exists()
    )


def test_a_report_is_written_without_jax() -> None:
    write_run(Path("a"), 2)
    code = (
        "import sys, maxbatch.cli; maxbatch.cli.main(['report', 'a']); sys.exit('jax' in "
        "sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code]).returncode == 0
        and Path("a/report.html").is_file()
    )


def test_a_torn_last_line_is_left_out() -> None:
    write_run(Path("a"), 4)
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 5, "samples_se')
    assert [record["step"] for record in ReportedRun.read(Path("a"), "a").records] == [1, 2, 3, 4]


def test_long_runs_are_thinned_by_a_rule_that_the_page_states() -> None:
    steps = 2 * MOST_POINTS + 7
    write_run(
        Path("a"),
        steps,
        stage=lambda step: int(step > 30_001),
        eval_loss=lambda step: 2.5 if step == 777 else ...,
    )
    (run,) = fitted([ReportedRun.read(Path("a"), "a")])
    drawn = [run.records[i]["step"] for i in run.drawn]
    assert {1, 777, 30_002, steps} <= set(drawn) and len(drawn) < MOST_POINTS
    make_page([Path("a")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert f"of {steps:,} updates {len(drawn):,} are drawn: 1 in {run.apart}," in text
    assert page_data(Path("page.html"))["runs"][0]["axes"]["steps"] == drawn


def test_a_page_of_long_runs_stays_small_beside_the_plotting_library() -> None:
    number = lambda step: 1 / (step + 0.1)  # noqa: E731  of many digits
    names = ("loss", "grad_norm", "tokens_per_second", "step_time_s", "mfu", "gradient_noise_scale")
    for name in ("a", "b"):
        write_run(Path(name), 12_000, **dict.fromkeys(names, number))
    make_page([Path("a"), Path("b")]).write(Path("page.html"))
    assert len(Path("page.html").read_bytes()) - len(packed_bokeh()) < 1_500_000
    runs = page_data(Path("page.html"))["runs"]
    assert all(
        len(run["axes"]["steps"]) > 1000 and run["axes"]["steps"][-1] == 12_000 for run in runs
    )


@pytest.mark.parametrize(
    ("overrides", "columns", "said"),
    [
        (
            (),
            {"num_micro_batches": 1, "gradient_noise_scale": None},
            "each update of this run is a single part",
        ),
        (
            (),
            {"num_micro_batches": 2, "gradient_noise_scale": None},
            "no estimate is positive so far",
        ),
        (("gradient_noise_scale=false",), {}, "gradient_noise_scale=false does not measure it"),
        ((), {"num_micro_batches": 1, "gradient_noise_scale": 50.0}, None),
        (("batch_size=4", "gradient_noise_scale=false"), {}, None),
    ],
)
def test_a_run_without_a_noise_scale_says_why(
    overrides: tuple[str, ...], columns: dict[str, float | None], said: str | None
) -> None:
    write_run(
        Path("a"),
        2,
        *overrides,
        **{name: lambda _, value=value: value for name, value in columns.items()},
    )
    make_page([Path("a")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert ("no gradient noise scale" in text) == (said is not None) and (said or "") in text


def test_the_page_may_load_nothing_and_says_so() -> None:
    write_run(Path("a"), 3)
    make_page([Path("a")]).write(Path("page.html"))
    policy = re.search(
        r'http-equiv="Content-Security-Policy" content="([^"]*)"', Path("page.html").read_text()
    )
    assert policy and policy[1].startswith("default-src 'none';") and "http" not in policy[1]


def test_every_stage_has_its_throughput_and_every_run_its_devices() -> None:
    write_run(
        Path("a"), 6, stage=lambda step: int(step > 3), tokens_per_second=lambda step: 100.0 * step
    )
    record_devices(Path("a"), DevicesUsed(1, "TPU v5p", 16, 4, 1, {}))
    (run,) = [ReportedRun.read(Path("a"), "a")]
    assert [row[1:5] for row in run.stage_rates()] == [[0, 16, 3, 200.0], [1, 16, 3, 500.0]]
    make_page([Path("a")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert (
        "Throughput by stage" in text and '<td>16 x TPU v5p</td><td class="number">4</td>' in text
    )


def test_a_sweep_ranks_its_trials_and_marks_the_best() -> None:
    make_sweep()
    make_page([Path("sw")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert text.count("<tr class=best>") == 1
    ranks = re.findall(
        r"<tr(?: class=best)?><td class=\"number\">(1|2|–)</td><td class=\"number\">\d</td>", text
    )
    assert ranks == ["1", "2", "–"]


def test_watch_follows_a_run_until_it_is_stopped() -> None:
    write_run(Path("a"), 3)
    process = start("report", "a", "--watch", "1")
    page = Path("a/report.html")
    wait_for(page.exists, process)
    assert '<meta http-equiv="refresh" content="1">' in page.read_text()
    first = json.loads(Path("a/metrics.jsonl").read_text().splitlines()[-1])
    with Path("a/metrics.jsonl").open("a") as file:
        file.write(json.dumps(first | {"step": 4, "samples_seen": 64}) + "\n")
    wait_for(lambda: page_data(page)["runs"][0]["axes"]["steps"][-1] == 4, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "refresh" not in page.read_text().split("</head>")[0].split("<style>")[0]


def test_watch_draws_a_line_that_came_while_the_page_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_run(Path("a"), 3)
    write, seen = Page.write, []

    def write_beside_a_trainer(page: Page, path: Path) -> None:
        write(page, path)
        with Path("a/metrics.jsonl").open("a") as file:
            file.write("{}")

    monkeypatch.setattr(Page, "write", write_beside_a_trainer)
    monkeypatch.setattr(command, "_watch", lambda paths, output, seconds, drawn: seen.append(drawn))
    assert main(["report", "a", "--watch", "1"]) == 0
    assert seen[0] != metrics_files([Path("a")])


def test_watch_sees_a_run_whose_machine_has_a_clock_an_hour_behind() -> None:
    for name, age in (("a", 0), ("b", 3600)):
        write_run(Path(name), 3)
        os.utime(Path(name, "metrics.jsonl"), (time.time() - age,) * 2)
    before = metrics_files([Path("a"), Path("b")])
    assert before == metrics_files([Path("a"), Path("b")])
    with Path("b/metrics.jsonl").open("a") as file:
        file.write("{}")
    os.utime(Path("b/metrics.jsonl"), (time.time() - 3599,) * 2)
    assert metrics_files([Path("a"), Path("b")]) != before


def test_smoothing_is_the_mean_of_the_last_updates() -> None:
    assert smoothed([4.0, 2.0, None, 6.0, 1.0], 3) == [4.0, 3.0, 3.0, 4.0, 3.5]
    assert smoothed([None, 1.0], 1) == [None, 1.0]


def test_time_is_cumulative_and_in_hours_for_long_runs() -> None:
    write_run(Path("a"), 4)
    write_run(Path("b"), 4, step_time_s=lambda step: 3600.0)
    assert ReportedRun.read(Path("a"), "a").columns(1).axes["time"] == [0.25, 0.5, 0.75, 1.0]
    make_page([Path("a"), Path("b")]).write(Path("page.html"))
    data = page_data(Path("page.html"))
    assert data["runs"][1]["axes"]["time"] == [1, 2, 3, 4]
    assert "hours" in data["figures"][0]["units"]["time"]


def test_a_run_has_one_colour_everywhere_and_no_two_share_one() -> None:
    assert len({colour(i) for i in range(40)}) == 40
    for name in ("a", "b"):
        write_run(Path(name), 3)
    make_page([Path("a"), Path("b")]).write(Path("page.html"))
    data, text = page_data(Path("page.html")), Path("page.html").read_text()
    assert [run["colour"] for run in data["runs"]] == [colour(0), colour(1)]
    # in the table, and beside the buttons
    assert all(text.count(f"background:{colour(i)}") == 2 for i in (0, 1))


def test_the_plan_is_the_batch_plans_own_for_the_devices_that_the_run_had() -> None:
    write_run(Path("a"), 3, "per_device_batch_size=4", "gradient_accumulation_steps=2")
    record_devices(Path("a"), DevicesUsed(1, "TPU v4", 4, 1, 1, {"data": 1, "fsdp": 4}))
    record_devices(Path("a"), DevicesUsed(3, "TPU v5p", 2, 2, 1, {"data": 2, "fsdp": 1}))
    make_page([Path("a")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert "16 samples per update = 4 per device x 2 devices x 2 accumulation steps" in text
    assert "Planned for 1 device" not in text
    assert re.search(
        r"1</td><td>TPU v4</td>.*>4<.*fsdp 4</td>.*3</td><td>TPU v5p</td>.*>2<.*>2<.*data 2</td>",
        text,
    )


def test_where_the_devices_are_unknown_the_page_says_that_it_planned_for_one() -> None:
    write_run(Path("a"), 3, "global_batch_size=16")
    make_page([Path("a")]).write(Path("page.html"))
    assert "Planned for 1 device" in Path("page.html").read_text()


def test_the_ramp_table_shows_every_stage() -> None:
    write_run(
        Path("a"),
        3,
        "enable_rampup_batch_size=true",
        "per_device_batch_size_increment=4",
        global_batch_size=lambda step: 4,
    )
    make_page([Path("a")]).write(Path("page.html"))
    cells = re.findall(r"<tr>(.*?)</tr>", Path("page.html").read_text().split("from sample")[1])
    rows = [[re.sub("<.*?>", "", cell) for cell in row.split("</td>")] for row in cells[:4]]
    assert [row[8] for row in rows] == ["4", "8", "12", "16"]


def test_configs_are_compared_by_what_differs() -> None:
    write_run(Path("a"), 2, "learning_rate=1e-3")
    write_run(Path("b"), 2, "learning_rate=2e-3")
    make_page([Path("a"), Path("b")]).write(Path("page.html"))
    table = Path("page.html").read_text().split("where the runs differ")[1].split("</table>")[0]
    assert (
        re.sub("<.*?>", " ", table).split()[-3:] == ["learning_rate", "0.001", "0.002"]
        and "run_dir" not in table
    )


def test_names_from_outside_cannot_become_markup() -> None:
    evil = Path("</script><b>x")
    write_run(evil, 2)
    make_page([evil]).write(Path("page.html"))
    assert "<b>x" not in Path("page.html").read_text()


def test_tokens_are_counted_without_padding_and_those_of_older_lines_are_slots() -> None:
    write_run(Path("run"), 4, tokens=lambda step: 100 if step > 2 else ...)
    run = ReportedRun.read(Path("run"), "run")
    assert run.tokens == [512, 1024, 1124, 1224]
    assert (
        run.summary()[3] == run.totals()["tokens"] == 1224 and run.totals()["tokens_seen"] == 2048
    )


def test_throughput_leaves_the_first_updates_of_a_longer_run_out_and_titles_say_what_is_drawn() -> (
    None
):
    rate = lambda step: 1.0 if step <= 2 else 100.0 + step  # noqa: E731
    write_run(Path("long"), 12, tokens_per_second=rate)
    write_run(Path("short"), 10, tokens_per_second=rate)
    long, short = (ReportedRun.read(Path(name), name) for name in ("long", "short"))
    assert long.columns(1).columns["tokens_per_second"] == [None, None, *map(rate, range(3, 13))]
    assert long.summary()[7] == long.stage_rates()[0][4] == 107.5 and long.stage_rates()[0][3] == 12
    assert short.columns(1).columns["tokens_per_second"][:2] == [1.0, 1.0]
    make_page([Path("long")]).write(Path("page.html"))
    text = Path("page.html").read_text()
    assert (
        "Loss (faint), and its mean over 5 updates" in text
        and "Throughput, without the first updates" in text
    )
    assert "this table scrolls sideways" in text


def test_every_panels_columns_reach_the_page() -> None:
    written = (
        "loss",
        "global_batch_size",
        "learning_rate",
        "tokens_per_second",
        "step_time_s",
        "grad_norm",
    )
    others = set(COLUMNS) - {*written, "smoothed loss"}
    functions = {"reward/is_right", "reward/is_short"}
    write_run(Path("a"), 5, **dict.fromkeys((*others, *functions), lambda step: 1.0))
    make_page([Path("a")]).write(Path("page.html"))
    figures = page_data(Path("page.html"))["figures"]
    assert len(figures) == len(PANELS) + 2, "and one of each of several reward functions"
    assert {line["column"] for figure in figures for line in figure["lines"]} == set(
        COLUMNS
    ) | functions


def test_a_sweep_folder_shows_its_own_plots_and_the_curves_of_its_trials() -> None:
    make_sweep()
    make_page([Path("sw")]).write(Path("page.html"))
    data, text = page_data(Path("page.html")), Path("page.html").read_text()
    assert data["figures"][0]["x"]["kind"] == "log"
    assert len(data["figures"][0]["series"][0]["x"]) == 2 and len(data["runs"]) == 3
    assert "2 done, 1 failed" in text and "no &lt;luck&gt;" in text


_ODD = ("NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "-" + "9" * 5000)


@pytest.mark.parametrize("number", _ODD)
def test_a_hole_in_the_metrics_is_said_and_the_page_is_drawn(number: str) -> None:
    records = write_run(Path("run"), 30)
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    for place, name in enumerate(records[0]):
        value = json.dumps(records[place][name])
        lines[place] = lines[place].replace(f'"{name}": {value}', f'"{name}": {number}')
    Path("run/metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", "run"]) == 0
    text = Path("run/report.html").read_text()
    assert f"{len(records[0])} lines of metrics.jsonl (line 1, 2, 3, 4, 5 and others)" in text
    drawn = page_data(Path("run/report.html"))["runs"][0]["axes"]["steps"]
    assert drawn[-19:] == list(range(12, 31)) and len(drawn) < 30


@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500, "é" * 200])
def test_a_path_that_no_file_system_holds_is_one_line(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["report", path],
        ["report", "run", "--output", path],
        ["score", path, "x"],
        ["export", path],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_names_and_values_on_a_page_are_texts_and_no_html() -> None:
    evil = "</script><script>alert(1)<"
    write_run(Path(evil.replace("/", "\u2044")), 3, f"generate_prompt={evil}")
    assert main(["report", evil.replace("/", "\u2044"), "--output", "page.html"]) == 0
    text = Path("page.html").read_text()
    assert "<script>alert" not in text and text.count("</script>") == text.count("<script")
    assert "default-src 'none'" in text


def test_the_loads_of_experts_are_drawn_over_time() -> None:
    def choices(step: int) -> Any:
        return {"0": step, "1": 8 - step} if step % 2 == 0 else ...

    write_run(Path("sparse"), 4, expert_choices=choices)
    make_page([Path("sparse")]).write(Path("page.html"))
    (drawn,) = [
        map for figure in page_data(Path("page.html"))["figures"] if (map := figure.get("heatMap"))
    ]
    assert (drawn["x"], drawn["y"], drawn["values_YxX"]) == (
        [2, 4],
        ["0", "1"],
        [[0.5, 1.0], [1.5, 1.0]],
    )


def _write_sessions(path: Path) -> None:
    parts = {part.value: 0.0 for part in TimePart}
    one = Session(
        1e9,
        1e9 + 10,
        2,
        8,
        1,
        5,
        parts | {"start_up": 2.0, "updates_kept": 6.0, "updates_lost": 2.0},
    )
    two = Session(
        1e9 + 40, 1e9 + 50, 1, 4, 4, 6, parts | {"updates_kept": 10.0, "since_session_before": 30.0}
    )
    (path / SESSIONS_FILE).write_text(
        "".join(json.dumps(each.to_json()) + "\n" for each in (one, two))
    )


def test_a_report_draws_where_the_time_went_and_prints_goodput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(Path("a"), 6)
    assert main(["report", "a"]) == 0
    assert "goodput" not in capsys.readouterr().err + Path("a/report.html").read_text(), (
        "of a run without sessions"
    )
    _write_sessions(Path("a"))
    assert main(["report", "a"]) == 0
    said = capsys.readouterr().err
    assert said == "maxbatch: a: goodput 32.0% of 50 s in 2 sessions, 2 updates trained again\n"
    page = Path("a/report.html").read_text()
    assert "Where the time went" in page and "between sessions 60.0%" in page
    widths = [float(width) for width in re.findall(r'<i style="width:([0-9.]+)%', page)]
    assert sum(widths) == pytest.approx(100)


def test_a_report_as_json_has_goodput_and_every_session(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("a"), 6)
    _write_sessions(Path("a"))
    write_run(Path("b"), 3)
    assert main(["report", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] == found["runs"][0]["goodput"] == 0.32
    assert sum(found["seconds"].values()) == 50
    a, b = found["runs"]
    assert [
        (each["first_step"], each["updates_lost"], each["hosts"]) for each in a["sessions"]
    ] == [
        (1, 2, 2),
        (4, 0, 1),
    ]
    assert (a["steps"], a["seconds"]["updates_lost"], a["updates_lost"]) == (6, 2, 2)
    assert (b["sessions"], b["goodput"], b["steps"]) == ([], None, 3)
    assert (b["marks"], b["forked_from"]) == ([], None)
    assert not Path("report.html").exists()
    assert main(["report", "sw", "--json", "--watch"]) == 2
