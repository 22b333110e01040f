"""`maxbatch report` marks skipped updates and holes, and draws forks from their parents."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxbatch.around.pages.plots import MARKS
from maxbatch.around.report.marks import COLUMNS, find_marks
from maxbatch.around.report.runs import MOST_POINTS, ReportedRun
from maxbatch.cli import main
from maxbatch.commands.report import make_page
from maxbatch.run.folder.metrics_schema import SkipReason
from maxbatch.run.folder.run_id import RUN_FILE, ForkedFrom, RunIdentity
from tests.helpers.reports import write_run

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'maxbatch[report]')")

SPIKE, NON_FINITE, HOLE_AT, LEFT_OUT = 4, 7, 6, 64


def write_marked(name: str, steps: int = 12, **columns: Any) -> None:
    """Write a run with a spike, an update that is not finite, and a hole between."""
    reasons = {SPIKE: "spike", NON_FINITE: "non-finite"}
    columns = {
        "loss": lambda step: None if step == NON_FINITE else 9.0 if step == SPIKE else 2.0,
        "skipped": lambda step: step in reasons,
        "skip_reason": reasons.get,
        "stream_position": lambda step: 16 * step + (LEFT_OUT if step >= HOLE_AT else 0),
    } | columns
    write_run(Path(name), steps, **columns)


def identify(name: str, fork: ForkedFrom | None = None) -> str:
    identity = RunIdentity.new(is_older=False, forked_from=fork)
    Path(name, RUN_FILE).write_text(json.dumps(dataclasses.asdict(identity)))
    return identity.run_id


def write_fork(step: int) -> None:
    """Write the marked run `a`, and `b`, a fork of it after a step."""
    write_marked("a")
    run_id = identify("a")
    write_marked("b", 15)
    identify("b", {"run": str(Path("a").absolute()), "run_id": run_id, "step": step})


def runs_of(page: Path) -> list[dict[str, Any]]:
    data = re.search(r'id="page-data" type="application/json">(.*?)</script>', page.read_text())
    assert data
    return json.loads(data[1])["runs"]


def marked_steps(run: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return for each mark the steps that have it, with its height."""
    return {
        name: {
            step: y
            for step, y in zip(run["axes"]["steps"], run["columns"][name], strict=True)
            if y is not None
        }
        for name in COLUMNS
        if name in run["columns"]
    }


def test_skipped_updates_and_holes_are_marked_in_the_plot_of_the_loss() -> None:
    write_marked("a")
    make_page([Path("a")]).write(Path("page.html"))
    (run,) = runs_of(Path("page.html"))
    mean = run["columns"]["smoothed loss"]
    assert marked_steps(run) == {
        "spike": {SPIKE: 9.0},
        "not finite": {NON_FINITE: mean[NON_FINITE - 1]},
        "hole": {HOLE_AT: mean[HOLE_AT - 1]},
    }
    caption = re.findall("<figcaption>(.*?)</figcaption>", Path("page.html").read_text())
    assert caption == [" ".join(sentence for _, sentence in COLUMNS.values())]


def test_the_page_names_the_replay_command_of_each_marked_update() -> None:
    write_marked("my run")
    make_page([Path("my run")]).write(Path("page.html"))
    section = Path("page.html").read_text().split("<h2>Marked updates</h2>")[1].split("</table>")[0]
    assert "2 skipped updates (1 spike, 1 not finite), 1 update behind holes (64 samples" in section
    rows = [re.sub("<.*?>", "|", row) for row in section.split("<tr>")[2:]]
    for row, step, words in zip(
        rows,
        (NON_FINITE, SPIKE, HOLE_AT),
        ("not finite", "spike", "hole: 64 samples left out of 80 to 159"),
        strict=True,
    ):
        command = f"maxbatch replay &#x27;my run&#x27; --step {step}"
        assert words in row and command in row


def test_the_terminal_has_the_number_of_marks_and_the_newest_three_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_marked(
        "a", 30, skipped=lambda step: step > 5, skip_reason=lambda step: "spike", loss=lambda _: 2.0
    )
    assert main(["report", "a"]) == 0
    head, *commands = capsys.readouterr().err.splitlines()
    assert "25 skipped updates (25 spikes)" in head and "the newest 3 of 25 marks" in head
    assert [line.split("replay ")[1] for line in commands] == [
        f"a --step {step}" for step in (30, 29, 28)
    ]


def test_a_report_as_json_has_every_mark_and_the_origin_of_a_fork(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_fork(5)
    assert main(["report", "a", "b", "--json"]) == 0
    parent, fork = json.loads(capsys.readouterr().out)["runs"]
    facts = [
        (mark["step"], mark["skip_reason"], mark["left_out"], mark["first"], mark["end"])
        for mark in parent["marks"]
    ]
    assert facts == [
        (SPIKE, "spike", 0, 48, 64),
        (HOLE_AT, None, LEFT_OUT, 80, 160),
        (NON_FINITE, "non-finite", 0, 160, 176),
    ]
    assert [mark["loss"] for mark in parent["marks"]] == [9.0, 2.0, None]
    assert parent["marks"][0]["replay"] == f"maxbatch replay a --step {SPIKE}"
    assert parent["forked_from"] is None and fork["forked_from"]["step"] == 5
    assert [mark["replay"].split()[2] for mark in fork["marks"]] == [
        str(Path("a").absolute()),
        "b",
        "b",
    ]


def test_a_run_without_marks_has_no_word_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("a"), 5, skipped=lambda step: False, stream_position=lambda step: 16 * step)
    assert main(["report", "a"]) == 0
    text = Path("a/report.html").read_text()
    assert "Marked updates" not in text and "<figcaption>" not in text
    assert capsys.readouterr().err == ""


def test_lines_without_a_reason_or_a_position_are_those_of_older_versions() -> None:
    line = {"step": 1, "samples_seen": 16, "skipped": True}
    newer = {"step": 2, "samples_seen": 32, "stream_position": 40}
    first, hole = find_marks([line, newer])
    assert (first.reason, first.left_out) == (SkipReason.NON_FINITE, 0)
    assert (hole.reason, hole.left_out) == (None, 8)
    assert find_marks([newer]) == [], "of a run whose first lines are elsewhere"
    assert find_marks([newer | {"step": 1}])[0].left_out == 8, "a hole at the start"


def test_a_fork_beside_its_parent_begins_at_its_step_and_leaves_its_parents_marks_out() -> None:
    write_fork(5)
    make_page([Path("a"), Path("b")]).write(Path("page.html"))
    parent, fork = runs_of(Path("page.html"))
    assert parent["axes"]["steps"] == list(range(1, 13))
    assert fork["axes"]["steps"] == list(range(5, 16))
    assert fork["columns"]["loss"][:2] == [2.0, 2.0] and fork["axes"]["samples"][0] == 80
    assert marked_steps(fork).keys() == {"not finite", "hole"}
    text = Path("page.html").read_text()
    assert "b: a fork of a after 5 updates, where its curves begin." in text
    assert text.count(f"--step {SPIKE}<") == 1 and "updates are drawn" not in text


def test_a_fork_alone_is_whole_and_its_parents_updates_are_replayed_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_fork(5)
    assert main(["report", "b"]) == 0
    assert runs_of(Path("b/report.html"))[0]["axes"]["steps"] == list(range(1, 16))
    commands = [line.split("maxbatch replay ")[-1] for line in capsys.readouterr().err.splitlines()]
    assert commands[1:] == [
        f"b --step {NON_FINITE}",
        f"{Path('a').absolute()} --step {SPIKE}",
        f"b --step {HOLE_AT}",
    ]


def test_marked_updates_of_a_long_run_are_all_drawn() -> None:
    write_marked("a", 60)
    run = dataclasses.replace(ReportedRun.read(Path("a"), "a"), most_points=5)
    assert run.most_points < MOST_POINTS and len(run.drawn) < 12
    assert {SPIKE - 1, HOLE_AT - 1, NON_FINITE - 1} <= set(run.drawn)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_marks_are_in_the_legend_of_the_svg(names: list[str]) -> None:
    for name in names:
        write_marked(name)
    make_page([Path(name) for name in names]).write_svg(Path("plots"))
    (file,) = Path("plots").glob("loss*.svg")
    text = file.read_text()
    for name, (style, sentence) in COLUMNS.items():
        assert style in MARKS and text.count(f">{name}</text>") == 1 and sentence in text
