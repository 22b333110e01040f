"""A study's database that is missing, damaged, locked or silent: one line, in bounded time."""

from __future__ import annotations

import re
import sqlite3
import threading
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.cli import main
from maxbatch.commands.sweep import storage
from maxbatch.commands.sweep.storage import Storage
from maxbatch.commands.sweep.study import SweepStudy
from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.runs.sweep_folder import SweepFolder
from maxbatch.system.errors import TrainingError
from tests.helpers.sweeps import RATES, write_sweep


def write_optuna_sweep(url: str) -> str:
    return write_sweep(RATES, sampler="optuna", trials=2, storage=url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///nowhere/x.db", "unable to open"),
        ("sqlite:///damaged.db", "not a database"),
        ("nodb://me:secret@host/x", "nodb"),
        ("x", "URL"),
    ],
)
def test_a_storage_that_is_at_fault_is_one_line_and_exit_code_2(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("damaged.db").write_bytes(b"no database" * 1000)
    assert main(["sweep", write_optuna_sweep(url)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("maxbatch: error: storage=") and error.count("\n") == 1
    assert said in error and "secret" not in error and "works: storage: sqlite:///sweep.db" in error


def test_a_damaged_study_of_a_sweep_without_a_storage_names_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sw").mkdir()
    Path("sw/optuna.db").write_bytes(b"no database" * 1000)
    assert main(["sweep", write_sweep(RATES)]) == 2
    assert re.search(r"sw/optuna\.db: cannot be opened .*restore it, or remove it", capsys.readouterr().err)


def test_a_locked_storage_is_exit_code_1_and_the_same_command_goes_on() -> None:
    def opened() -> None:
        raise sqlite3.OperationalError("database is locked")

    with pytest.raises(TrainingError, match=r"database is locked\); run the same command again"):
        Storage.of("sqlite:///x.db", Path("y")).open(opened)


def test_a_storage_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_OPENING_S", 0.1)
    answers = threading.Event()
    with pytest.raises(TrainingError, match=r"storage=postgresql://\.\.\.@host/x: has not answered within 0.1 s"):
        Storage.of("postgresql://me:secret@host/x", Path("y")).open(answers.wait)
    answers.set()


def test_a_storage_that_is_damaged_while_a_sweep_runs_is_one_line() -> None:
    sweep = SweepFile.read(write_optuna_sweep("sqlite:///study.db"))
    study = SweepStudy(sweep, SweepFolder(sweep.sweep_dir))
    Path("study.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"storage=sqlite:///study\.db: cannot be used"):
        study.next()
