"""Optuna's trials: their number, pruning, going on after a kill, and one storage for several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maxbatch import ConfigError
from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.runs.sweep_folder import SweepFolder
from tests.helpers.command import maxbatch
from tests.helpers.sweeps import BASE, write_evals, write_sweep


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


RANGES = {"learning_rate": {"low": "1e-4", "high": "1e-1", "log": True}, "opt_type": ["adamw", "lion"]}
ON_EVALS = {"sampler": "optuna", "metric": "eval_loss", "base": BASE | {"eval_interval": 2}}


def optuna_trials(trials: int, sweep_dir: str = "sw", **settings: Any) -> Any:
    from maxbatch.commands.sweep.study import SweepStudy

    name = write_sweep(
        **({"parameters": RANGES, "sweep_dir": sweep_dir, "trials": trials} | ON_EVALS | settings)
    )
    sweep = SweepFile.read(name)
    return SweepStudy(sweep, SweepFolder(sweep.sweep_dir))


def end(source: Any, claimed: Any, status: str, *losses: float) -> None:
    folder = SweepFolder(claimed.trial.folder.parent.parent)
    write_evals(claimed.trial, *losses)
    folder.finish(claimed.trial, status)
    source.finished(folder.result(claimed.trial, "eval_loss"))
    claimed.claim.close()


def test_optuna_trials_are_as_many_as_asked_for_and_end_with_their_values(optuna: Any) -> None:
    source = optuna_trials(4)
    for number, status in enumerate(("done", "done", "failed", "diverged")):
        claimed = source.next()
        assert claimed.trial.number == number and not source.is_exhausted()
        assert 1e-4 <= float(claimed.trial.overrides["learning_rate"]) <= 1e-1
        end(source, claimed, status, 3.0, 2.0 + number)
    assert source.next() is None and source.is_exhausted()
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sw/optuna.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED"]
    assert [trial.value for trial in study.trials[:2]] == [2.0, 3.0]
    assert float(SweepFolder(Path("sw")).trials()[0].overrides["learning_rate"]) == pytest.approx(
        study.trials[0].params["learning_rate"], rel=1e-5
    )


def test_a_trial_whose_eval_loss_is_above_the_others_median_is_pruned(optuna: Any) -> None:
    source = optuna_trials(8)
    for _ in range(5):
        claimed = source.next()
        write_evals(claimed.trial, 3.0, 2.0)
        assert source.should_prune(claimed.trial) is None
        end(source, claimed, "done", 3.0, 2.0)
    bad, good = source.next(), source.next()
    write_evals(good.trial, 2.9)
    write_evals(bad.trial, 3.1)
    assert source.should_prune(good.trial) is None
    assert source.should_prune(bad.trial) == "eval_loss 3.1000 at 128 tokens is above the others' median"
    for claimed in (bad, good):
        claimed.claim.close()


@pytest.mark.slow
def test_a_sweep_stops_trials_whose_eval_loss_is_above_the_others(optuna: Any) -> None:
    base = BASE | {"steps": 100, "eval_interval": 2, "eval_fraction": "0.1"}
    source = optuna_trials(8, base=base, parallel=2)
    for _ in range(5):
        claimed, losses = source.next(), [0.1] * 50  # at every eval better than any that is trained
        write_evals(claimed.trial, *losses)
        assert source.should_prune(claimed.trial) is None
        end(source, claimed, "done", *losses)
    result = maxbatch("sweep", "sweep.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    stopped = SweepFolder(Path("sw")).results("eval_loss")[5:]
    assert [trial.status for trial in stopped] == ["pruned"] * 3
    for trial in stopped:
        assert 0 < trial.steps < 100 and "above the others' median" in trial.reason


def test_a_killed_optuna_sweep_goes_on_with_the_trials_that_it_began(optuna: Any) -> None:
    source = optuna_trials(4)
    first, second = source.next(), source.next()
    overrides = first.trial.overrides
    first.claim.close()
    # One ended, but the study was not told; one was begun, but has no folder yet.
    SweepFolder(Path("sw")).finish(second.trial, "done")
    write_evals(second.trial, 2.5)
    second.claim.close()
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sw/optuna.db")
    study.ask()

    again = optuna_trials(4)
    assert [trial.state.name for trial in study.get_trials()] == ["RUNNING", "COMPLETE", "RUNNING"]
    resumed, adopted, new = again.next(), again.next(), again.next()
    assert resumed.trial.overrides == overrides and resumed.trial.number == 0
    assert (adopted.trial.number, new.trial.number) == (2, 3) and again.next() is None
    for claimed in (resumed, adopted, new):
        end(again, claimed, "done", 3.0)
    assert again.is_exhausted() and len(study.get_trials()) == 4


def test_several_machines_share_one_storage_and_its_number_of_trials(optuna: Any) -> None:
    storage = f"sqlite:///{Path('shared.db').resolve()}"
    one, other = (optuna_trials(5, sweep_dir, storage=storage) for sweep_dir in ("one", "other"))
    claims = [source.next() for source in (one, other, one, other, one)]
    assert sorted(claimed.trial.number for claimed in claims) == [0, 1, 2, 3, 4]
    assert one.next() is None and other.next() is None
    assert len({claimed.trial.title for claimed in claims}) == 5
    for source, claimed in zip((one, other, one, other, one), claims, strict=True):
        end(source, claimed, "done", 3.0)
    assert one.is_exhausted() and other.is_exhausted()
    assert len(SweepFolder(Path("one")).trials()) == 3 and len(SweepFolder(Path("other")).trials()) == 2


def test_two_machines_that_ask_for_the_last_trial_at_once_run_it_once(
    optuna: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"sqlite:///{Path('shared.db').resolve()}"
    one, other = (optuna_trials(1, sweep_dir, storage=storage) for sweep_dir in ("one", "other"))
    ask_late, claims = one._study.ask, []

    def ask_behind_the_other() -> Any:
        claims.append(other.next())
        return ask_late()

    monkeypatch.setattr(one._study, "ask", ask_behind_the_other)
    assert one.next() is None and one.is_exhausted()
    assert claims[0].trial.number == 0 and not SweepFolder(Path("one")).trials()
    claims[0].claim.close()


def test_an_optuna_sweep_may_have_more_trials_but_no_other_parameters(optuna: Any) -> None:
    end(source := optuna_trials(1), source.next(), "done", 3.0)
    claimed = optuna_trials(2).next()
    assert claimed.trial.number == 1
    claimed.claim.close()
    with pytest.raises(ConfigError, match="metric: eval_loss, not loss"):
        optuna_trials(2, metric="loss")
    with pytest.raises(ConfigError, match=r"learning_rate: \{low: 0\.0001"):
        optuna_trials(2, parameters=RANGES | {"learning_rate": {"low": "1e-3", "high": "1e-1"}})
    with pytest.raises(ConfigError, match="steps=4, not 5"):
        optuna_trials(2, base=BASE | {"eval_interval": 2, "steps": 5})


def test_a_storage_that_cannot_be_opened_is_refused_without_its_password(optuna: Any) -> None:
    with pytest.raises(ConfigError, match=r"storage=nodb://\.\.\.@host/x: cannot be opened") as error:
        optuna_trials(2, storage="nodb://me:secret@host/x")
    assert "secret" not in str(error.value)
