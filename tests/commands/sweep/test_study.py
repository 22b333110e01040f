"""The trials of a sweep: which there are, pruning, going on after a kill, and one storage for several machines."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxbatch import ConfigError
from maxbatch.commands.sweep.command import forget_failed
from maxbatch.commands.sweep.study import SweepStudy
from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.config.loading import configs_dir
from maxbatch.runs.sweep_folder import SweepFolder
from tests.helpers.command import maxbatch
from tests.helpers.sweeps import BASE, RATES, planned, write_evals, write_sweep

optuna = pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


RANGES = {"learning_rate": {"low": "1e-4", "high": "1e-1", "log": True}, "opt_type": ["adamw", "lion"]}
ON_EVALS = {"sampler": "optuna", "metric": "eval_loss", "base": BASE | {"eval_interval": 2}}


def optuna_trials(trials: int, sweep_dir: str = "sw", **settings: Any) -> Any:
    name = write_sweep(**({"parameters": RANGES, "sweep_dir": sweep_dir, "trials": trials} | ON_EVALS | settings))
    sweep = SweepFile.read(name)
    return SweepStudy(sweep, SweepFolder(sweep.sweep_dir))


def end(source: Any, claimed: Any, status: str, *losses: float) -> None:
    folder = SweepFolder(claimed.trial.folder.parent.parent)
    write_evals(claimed.trial, *losses)
    folder.finish(claimed.trial, status)
    source.finished(folder.result(claimed.trial, "eval_loss"))
    claimed.claim.close()


def test_optuna_trials_are_as_many_as_asked_for_and_end_with_their_values() -> None:
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


def test_a_trial_whose_eval_loss_is_above_the_others_median_is_pruned() -> None:
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


@pytest.mark.processes
def test_a_sweep_stops_trials_whose_eval_loss_is_above_the_others() -> None:
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


def test_a_killed_optuna_sweep_goes_on_with_the_trials_that_it_began() -> None:
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


def test_several_machines_share_one_storage_and_its_number_of_trials() -> None:
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


def test_two_machines_that_ask_for_the_last_trial_at_once_run_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_trial_that_another_machine_has_just_begun_is_not_adopted_whatever_its_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = f"sqlite:///{Path('shared.db').resolve()}"
    one, other = (optuna_trials(1, sweep_dir, storage=storage) for sweep_dir in ("one", "other"))
    with monkeypatch.context() as an_hour_behind:
        past = datetime.datetime.now() - datetime.timedelta(hours=1)
        clock = type("Clock", (datetime.datetime,), {"now": classmethod(lambda cls, tz=None: past)})
        an_hour_behind.setattr("optuna.storages._rdb.storage.datetime", clock)
        begun = one._study.ask()
    assert begun.datetime_start < past + datetime.timedelta(minutes=1)
    assert other.next() is None and not other.is_exhausted(), "it waits, and does not end without the trial"
    monkeypatch.setattr("maxbatch.commands.sweep.study._LOST_S", 0)
    adopted = other.next()
    assert adopted is not None and adopted.trial.number == begun.number, "its process was killed"
    adopted.claim.close()


def test_an_optuna_sweep_may_have_more_trials_but_no_other_parameters() -> None:
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


def test_a_storage_that_cannot_be_opened_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"storage=nodb://\.\.\.@host/x: cannot be opened") as error:
        optuna_trials(2, storage="nodb://me:secret@host/x")
    assert "secret" not in str(error.value)


def test_the_ready_sweep_is_found_by_name_and_every_combination_works() -> None:
    sweep = SweepFile.read("batch_size")
    assert sweep.path == configs_dir() / "sweeps" / "batch_size.yml"
    study = SweepStudy(sweep, folder := SweepFolder(Path("sw")))
    for claimed in list(iter(study.next, None)):
        claimed.claim.close()
    assert len(folder.trials()) == 12 and not study.is_exhausted()
    assert all(trial.config is not None for trial in folder.trials())


def test_values_are_read_as_the_config_key_reads_them() -> None:
    folder = planned({"train_samples": ["1K", "0.5M"], "learning_rate": ["3e-4"]})
    first, second = folder.trials()
    assert first.overrides == {"train_samples": "1000", "learning_rate": "0.0003"}
    assert second.config is not None and second.config["train_samples"] == "500000"


def test_a_swept_alternative_displaces_the_one_in_base() -> None:
    (trial,) = planned({"train_tokens": ["64K"], "global_batch_size": ["8"]}).trials()
    assert trial.config is not None
    assert (trial.config["train_tokens"], trial.config["steps"]) == ("64000", "null")


def test_a_combination_that_the_config_refuses_is_a_failed_trial_and_the_others_run() -> None:
    folder = planned({"base_num_query_heads": ["4", "3"], "learning_rate": ["1e-3"]})
    good, refused = folder.trials()
    assert not good.is_finished
    result = folder.result(refused, "loss")
    assert result.status == "failed" and "must be a multiple of base_num_kv_heads" in result.reason
    assert "/" not in result.reason.split("base:")[0].replace("sweep.yml, base", "")


def test_combinations_that_are_all_refused_start_nothing() -> None:
    with pytest.raises(ConfigError, match=r"base_num_query_heads=3.*every one of the 2 combinations"):
        planned({"base_num_query_heads": ["3", "5"]})
    assert not Path("sw").exists()


def overrides_of(folder: SweepFolder) -> list[dict[str, str]]:
    return [trial.overrides for trial in folder.trials()]


@pytest.mark.runs
def test_the_random_sampler_is_a_function_of_seed_and_number() -> None:
    parameters = {
        "learning_rate": {"low": "1e-4", "high": "1e-2", "log": True},
        "global_batch_size": {"low": 4, "high": 64, "step": 4},
        "base_num_decoder_layers": {"low": 1, "high": 3},
        "opt_type": ["adamw", "lion"],
        "warmup_steps_fraction": {"low": 0, "high": 0.5},
        "train_samples": {"low": "1K", "high": "1M", "log": True},
    }
    few = overrides_of(planned(parameters, sampler="random", trials=3, sweep_dir="few"))
    assert overrides_of(planned(parameters, sampler="random", trials=5, sweep_dir="more"))[:3] == few
    assert overrides_of(planned(parameters, sampler="random", trials=3, sweep_dir="other", seed=1)) != few
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    swept = SweepFile.read("sweep.yml").parameters
    drawn = [{p.key.name: p.suggest(trial) for p in swept} for trial in (study.ask() for _ in range(200))]
    assert all(1e-4 <= float(d["learning_rate"]) <= 1e-2 for d in drawn)
    assert 70 < sum(float(d["learning_rate"]) < 1e-3 for d in drawn) < 130
    assert {int(d["global_batch_size"]) for d in drawn} == set(range(4, 65, 4))
    assert {d["base_num_decoder_layers"] for d in drawn} == {"1", "2", "3"}
    assert {d["opt_type"] for d in drawn} == {"adamw", "lion"}
    assert 40 < sum(int(d["train_samples"]) < 10_000 for d in drawn) < 95


def test_a_grid_may_grow_and_keeps_the_trials_that_it_has() -> None:
    before = planned(RATES).trials()
    after = planned({"learning_rate": ["1e-2", "3e-3", "1e-3"]}).trials()
    assert after[:2] == before and after[2].overrides == {"learning_rate": "0.01"}


def test_a_random_sweep_may_have_more_trials() -> None:
    parameters = {"learning_rate": {"low": "1e-4", "high": "1e-2"}}
    before = planned(parameters, sampler="random", trials=2).trials()
    assert planned(parameters, sampler="random", trials=4).trials()[:2] == before
    with pytest.raises(ConfigError, match="4 trials, not 2"):
        planned(parameters, sampler="random", trials=2)


@pytest.mark.parametrize(
    ("parameters", "base", "settings", "difference"),
    [
        ({"learning_rate": ["1e-3"]}, {}, {}, r"learning_rate=0\.003 \(trial 1\), which parameters no longer hold"),
        (RATES, {"steps": 5}, {}, r"steps=4, not 5 \(trial 0\)"),
        ({"adam_b1": ["0.9"]}, {}, {}, r"no longer hold"),
        (RATES, {}, {"sampler": "random", "trials": 2}, "sampler: grid, not random"),
    ],
)
def test_a_changed_sweep_is_refused_with_the_difference(
    parameters: Any, base: dict[str, Any], settings: dict[str, Any], difference: str
) -> None:
    records = {p: p.read_bytes() for p in (planned(RATES).path).rglob("*.*")}
    with pytest.raises(ConfigError, match=rf"sweep_dir=sw: was made with .*{difference}"):
        planned(parameters, base, **settings)
    assert {p: p.read_bytes() for p in Path("sw").rglob("*.*")} == records


def test_the_environment_of_a_trial_is_part_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(RATES)
    monkeypatch.setenv("MAXBATCH_ADAM_B1", "0.5")
    with pytest.raises(ConfigError, match=r"adam_b1=0\.9, not 0\.5"):
        planned(RATES)


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_a_sweep_begun_before_it_had_a_study_goes_on(sampler: str) -> None:
    swept = RATES if sampler == "grid" else {"learning_rate": {"low": "1e-4", "high": "1e-2", "log": True}}
    settings: dict[str, Any] = {"sampler": sampler} | ({"trials": 2} if sampler == "random" else {})
    folder = planned(swept, **settings)
    first, second = folder.trials()
    if sampler == "random":  # numbers that another generator drew
        second = folder.add(1, {"learning_rate": "0.00123"}, {**second.config, "learning_rate": "0.00123"})
    write_evals(first, 3.0)
    folder.finish(first, "done")
    for path in folder.path.glob("optuna.db*"):
        path.unlink()
    study = SweepStudy(SweepFile.read("sweep.yml"), folder)
    claimed = study.next()
    assert claimed is not None and claimed.trial == second and study.next() is None
    folder.finish(second, "done")
    claimed.claim.close()
    assert study.is_exhausted() and folder.trials() == [first, second]


def test_a_trial_whose_folder_was_removed_runs_again() -> None:
    folder = planned(RATES)
    first, second = folder.trials()
    shutil.rmtree(first.folder)
    again = planned(RATES).trials()
    assert [trial.overrides for trial in again] in (
        [first.overrides, second.overrides], [second.overrides, first.overrides])  # fmt: skip


def test_a_failed_trial_is_retried_and_one_that_diverged_is_not() -> None:
    folder = planned(RATES)
    failed, diverged = folder.trials()
    folder.finish(failed, "failed", "no disk")
    folder.finish(diverged, "diverged", "9 updates in a row")
    sweep = SweepFile.read("sweep.yml")
    assert SweepStudy(sweep, folder).is_exhausted()
    forget_failed(folder, "loss")
    study = SweepStudy(sweep, folder)
    claimed = study.next()
    assert claimed is not None and claimed.trial == failed and study.next() is None
    folder.finish(failed, "done")
    study.finished(folder.result(failed, "loss"))
    claimed.claim.close()
    assert study.is_exhausted()
