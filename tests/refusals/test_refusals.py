"""Bad input is refused in one line, and what the line names after `works:` is accepted.

A row of `table.txt` is what a user types and all that standard error says; three tests type it: a
config and its plan, a command in this process, and a command as a process of its own.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.cli import main
from maxbatch.system.errors import EXIT_INPUT, report
from tests.helpers.command import maxbatch
from tests.helpers.works import TYPIST, faults_of
from tests.refusals.given import GIVEN
from tests.refusals.rows import ANYTHING, ERROR, FOLDER, TABLE, Row, read_rows

ROWS = read_rows()
MACHINE = {
    "--devices": "num_devices",
    "--hosts": "num_hosts",
    "--slices": "num_slices",
    "--samples-per-epoch": "samples_per_epoch",
}
# commands that print nothing and make no folder before they refuse
_QUIET = ("plan", "config", "sweep", "audit")


def contents(folder: Path, with_folders: bool) -> dict[Path, int]:
    """Returns the times at which a folder's files changed last, Python's own files left out.

    Args:
      with_folders: whether folders in it are listed too, with 0.
    """
    return {
        path: path.stat().st_mtime_ns if path.is_file() else 0
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and (with_folders or path.is_file())
    }


@pytest.fixture(autouse=True)
def environment_of_a_command() -> Iterator[None]:
    """Ends the variables that a command sets for its process, such as flags of a TPU."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def prepare(row: Row, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes what the row takes for given in the working folder; returns the words to type."""
    if row.given:
        GIVEN[row.given](Path.cwd())
    for name, content in row.files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value)
    return [word.replace(FOLDER, os.getcwd()) for word in row.words]


def check(row: Row, said: str, messages: list[str]) -> None:
    """Compares standard error with the answer, whose one line of error is the last."""
    if not row.is_answer(said, Path.cwd()):
        pytest.fail(f"{TABLE.name}:{row.line}: standard error is\n{said}", pytrace=False)
    errors = [line for line in said.splitlines() if line.startswith(ERROR)]
    assert errors == said.splitlines()[-1:]
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_plan], ids=str)
def test_a_config_or_its_plan_is_refused_in_one_line_and_what_it_names_works(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepare(row, monkeypatch)
    machine, settings = {}, []
    while words:
        word = words.pop(0)
        if word in MACHINE:
            machine[MACHINE[word]] = int(words.pop(0))
        else:
            settings.append(word)
    file = settings.pop(0) if settings and "=" not in settings[0] else None
    with pytest.raises(ConfigError) as caught:
        BatchPlan.from_config(load_config(file, settings), **machine)
    assert report(caught.value) == EXIT_INPUT
    said = capsys.readouterr().err.rstrip("\n")
    check(row, said, [str(caught.value)])
    assert TYPIST.faults(are_all_typed=True) == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_command], ids=str)
def test_a_command_is_refused_in_one_line_and_what_it_names_works(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepare(row, monkeypatch)
    is_quiet = words[0] in _QUIET
    before = contents(Path.cwd(), with_folders=is_quiet)
    assert main(words) == EXIT_INPUT
    printed = capsys.readouterr()
    messages = [str(error) for error in TYPIST.said()]
    assert messages, "the error was not kept, so its works: is not typed"
    check(row, printed.err.rstrip("\n"), messages)
    assert contents(Path.cwd(), with_folders=is_quiet) == before, "a refusal writes nothing"
    assert not printed.out or not is_quiet or "--json" in words
    assert TYPIST.faults(are_all_typed=True) == []


@pytest.mark.processes
@pytest.mark.parametrize("row", [row for row in ROWS if row.is_process], ids=str)
def test_a_process_is_refused_in_one_line_and_what_it_names_works(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = maxbatch(*prepare(row, monkeypatch))
    assert ended.returncode == EXIT_INPUT
    message = ended.stderr.rstrip("\n")
    check(row, message, [])
    message = message.removeprefix(ERROR)
    if "works: " in message:
        assert faults_of(message, ConfigError(message), []) == []


def test_every_row_is_read_and_typed_once() -> None:
    typed = [(row.typed, row.files, row.given, row.is_process) for row in ROWS]
    assert len(set(typed)) == len(typed)
    assert all(row.promise and row.answer.strip(ANYTHING) for row in ROWS)
    assert all(shlex.split(row.typed) for row in ROWS)
