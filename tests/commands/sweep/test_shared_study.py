"""A sweep that several machines shared with maxbatch 0.4, in a database: one command reads and
continues it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.commands.sweep.study import SweepStudy
from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.runs.sweep_folder import SweepFolder
from tests.helpers.sweeps import RATES, planned, write_sweep

optuna = pytest.importorskip(
    "optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')"
)

STORAGE = "sqlite:///shared.db"
RATES_RECORDED = {"learning_rate": ["0.001", "0.003"]}


def write_shared_sweep(trials: int, storage: str = STORAGE) -> SweepFile:
    return SweepFile.read(write_sweep(RATES, sampler="optuna", trials=trials, storage=storage))


def test_one_command_continues_a_sweep_that_several_machines_shared() -> None:
    folder = planned(RATES, sampler="optuna", trials=1)  # the trial of this machine
    folder.finish(folder.trials()[0], "done")
    study = optuna.create_study(storage=STORAGE, study_name="sweep")
    study.set_user_attr(
        "maxbatch_parameters", json.dumps({"metric": "loss", "parameters": RATES_RECORDED})
    )
    here, done, running, lost, surplus = (study.ask() for _ in range(5))
    for trial in (here, done, running):
        trial.suggest_categorical("learning_rate", RATES_RECORDED["learning_rate"])
        trial.set_user_attr("sweep_dir", "some-host:/sweeps/one")
    study.tell(done, 0.5)
    study.tell(surplus, state=optuna.trial.TrialState.FAIL)
    assert lost.number == 3, "begun by a process that was killed before it recorded its values"
    before = Path("shared.db").read_bytes()

    sweep = write_shared_sweep(5)
    source = SweepStudy(sweep, folder)
    assert (source.num_trials, source.num_ended) == (5, 2)
    continued, *new = list(iter(source.next, None))
    assert continued.number == 2 and continued.overrides == running.params
    assert [trial.number for trial in new] == [3, 4] and source.is_exhausted()
    assert [trial.number for trial in folder.trials()] == [0, 2, 3, 4], (
        "trial 1 ended on its own machine"
    )
    assert 0.5 in [trial.value for trial in source._study.trials], "from which the sampler learns"
    assert SweepStudy(sweep, folder).num_trials == 5
    assert Path("shared.db").read_bytes() == before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///nowhere/x.db", "unable to open"),
        ("sqlite:///damaged.db", "not a database"),
        ("nodb://me:secret@host/x", "nodb"),
        ("x", "URL"),
        (STORAGE, "study sweep cannot be read"),  # there is none
    ],
)
def test_a_database_that_cannot_be_read_is_one_line_without_its_password(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("damaged.db").write_bytes(b"no database" * 1000)
    write_shared_sweep(2, url)
    assert main(["sweep", "sweep.yml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("maxbatch: error: storage=") and error.count("\n") == 1
    assert said in error and "secret" not in error and "without storage" in error


def test_a_shared_study_of_other_parameters_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    study = optuna.create_study(storage=STORAGE, study_name="sweep")
    study.set_user_attr(
        "maxbatch_parameters", json.dumps({"metric": "loss", "parameters": {"adam_b1": ["0.9"]}})
    )
    write_shared_sweep(2)
    assert main(["sweep", "sweep.yml"]) == 2
    assert "study sweep has the parameters {'adam_b1': ['0.9']}, not" in capsys.readouterr().err
    assert not SweepFolder(Path("sw")).trials()
