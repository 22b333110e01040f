"""Tables and bars keep to the width of a terminal: no cell is cut off, no line is longer, no word
is torn.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from maxbatch.parallel.hosts import warn
from maxbatch.system.errors import ConfigError, report
from maxbatch.system.terminal import bars
from maxbatch.system.terminal.bars import LinesAboveBar, Pace, progress_bar
from maxbatch.system.terminal.folding import folded_rows
from maxbatch.system.terminal.terminal import PlainConsole, PlainTable
from maxbatch.system.terminal.warning import note
from tests.helpers.terminals import in_terminal


def printed(table: PlainTable, columns: int) -> list[str]:
    out = io.StringIO()
    PlainConsole(file=out, width=columns, force_terminal=True, no_color=True).print(table)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]


WORDS = st.text("abcdefghij0123456789", min_size=1, max_size=14)


@given(
    rows=st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    columns=st.integers(40, 200),
)
def test_every_cell_is_whole_at_any_width(rows: list[list[str]], columns: int) -> None:
    table = PlainTable(*(f"head{i}" for i in range(len(rows[0]))))
    for row in rows:
        table.add_row(*row)
    lines = printed(table, columns)
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    assert all(cell in words for row in rows for cell in row)
    assert all(words.count(f"head{i}") == 1 for i in range(1, len(rows[0])))


def test_only_a_cell_that_is_too_wide_alone_is_folded_between_words() -> None:
    table = PlainTable("name", "text")
    table.add_row(
        "first", "some words that do not fit into a narrow terminal at all, not even nearly"
    )
    lines = printed(table, 40)
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[1:]).split()) == "first " + str(table.columns[1]._cells[0])


def test_a_pipe_folds_nothing() -> None:
    out = io.StringIO()
    PlainConsole(file=out).print("word " * 70)
    assert out.getvalue().count("\n") == 1


def test_a_warning_keeps_the_lines_of_an_error_and_a_note_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn("a reward has no value: first\n\tsecond")
    note("a run named first\nsecond")

    assert capsys.readouterr().err.splitlines() == [
        "maxbatch: warning: a reward has no value: first",
        "\tsecond",
        r"maxbatch: a run named first\nsecond",
    ]


@pytest.mark.parametrize(
    "say", [note, warn, lambda text: report(ConfigError(text))], ids=["note", "warning", "error"]
)
def test_lines_of_standard_error_break_between_words_on_a_terminal_alone(
    say: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(["counterexamples"] * 9)
    say(text)
    assert capsys.readouterr().err.endswith(f" {text}\n")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say(text)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40
    assert " ".join(lines).endswith(f" {text}")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_a_bar_keeps_the_time_that_is_left(columns: int) -> None:
    out = io.StringIO()
    bar = progress_bar(
        Console(file=out, width=columns, force_terminal=True, no_color=True), Pace(20, 0)
    )
    description = (
        "step 10000/20000 | loss 2.5000 | batch 1024 | stage 3/12 | lr 1.00e-03 | 1,234,567 "
        "tokens/s | MFU 51.2%"
    )
    bar.add_task(description, total=20, completed=7)
    with bar:
        pass
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).strip().split("\r")[-1]
    assert (
        len(line) <= columns and line.endswith("left") and "step 10000/20000 | loss 2.5000" in line
    )
    assert columns < 160 or "MFU 51.2%" in line


def test_the_time_left_follows_the_pace_of_steps_that_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(bars.time, "monotonic", lambda: now)
    out = io.StringIO()
    runs = LinesAboveBar(PlainConsole(file=out), total=10, done=2)
    now += 29
    runs.show(2, "2 of 10")
    now += 1
    runs.show(2, "2 of 10")
    now += 570
    runs.show(4, "4 of 10")
    runs.show(4, "4 of 10")
    assert out.getvalue().splitlines() == ["2 of 10", "4 of 10 | 0:30:00 left"]


def test_a_bar_and_its_lines_leave_standard_output_to_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LinesAboveBar(PlainConsole(stderr=True, force_terminal=True), total=2, done=0) as runs:
        runs.say("trial 0: learning_rate=0.1")
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "trial 0: learning_rate=0.1")


def test_the_last_column_of_a_table_is_folded_between_words() -> None:
    rows = [
        ("became", "word", "here"),
        ("mapped", "a_word_of_some_length", "some words that do not fit beside it"),
        ("ignored", "x" * 60, "a row whose word takes all of the room"),
    ]
    assert (
        folded_rows(rows, None)[1]
        == f"mapped   a_word_of_some_length{' ' * 41}some words that do not fit beside it"
    )
    lines = "\n".join(folded_rows(rows, 64)).splitlines()
    assert max(map(len, lines)) <= 69  # "ignored  " and the word of 60 letters
    assert "x" * 60 in "\n".join(lines)
    assert " ".join(" ".join(lines).split()) == " ".join(
        " ".join(cell for cell in row) for row in rows
    )


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_plan_keeps_to_the_terminal(columns: int) -> None:
    stated = ("enable_rampup_batch_size=true", "learning_rate_scaling=sqrt", "--layout", "--words")
    lines = in_terminal("plan", *stated, columns=columns)
    assert max(map(len, lines)) <= columns
    assert not any(
        not line.strip() and not after.strip() for line, after in itertools.pairwise(lines[:-1])
    ), "two empty lines: a line that was one column too long"
    assert "gradient_accumulation_steps" in " ".join(
        lines
    ) and "--rampup-batch-size 4 2 500" in " ".join(lines)


def test_a_text_of_a_file_cannot_move_the_cursor_nor_forge_a_row() -> None:
    stream = io.StringIO()
    console = PlainConsole(file=stream, force_terminal=True, width=60)
    console.print("a\x1b[2Jb\r\x07")
    console.print(Text("c\x9b2Jd\u202e"))
    table = PlainTable("one", "two")
    table.add_row("e\nforged", "f\x1b[1A")
    console.print(table)
    shown = stream.getvalue()
    assert "a\\x1b[2Jb\\r\\x07" in shown and "c\\x9b2Jd\\u202e" in shown and "e\\nforged" in shown
    assert not any(line.startswith("forged") for line in shown.splitlines())
    assert "\x1b[2J" not in shown and "\x1b[1A" not in shown and "\r" not in shown


def test_a_further_table_leaves_out_rows_that_are_empty_but_for_their_first_cell() -> None:
    table = PlainTable("one", "two", "three")
    table.add_row("first", "x" * 30, "")
    table.add_row("second", "", "y" * 30)
    assert [line.split() for line in printed(table, 45)] == [
        ["one", "two"],
        ["first", "x" * 30],
        ["second"],
        [],
        ["one", "three"],
        ["second", "y" * 30],
    ]
