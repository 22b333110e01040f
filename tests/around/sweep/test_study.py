"""The trials of a sweep: which there are, pruning, and going on after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from maxbatch import ConfigError
from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.around.sweep.study import SweepStudy
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.commands.sweep import forget_failed
from maxbatch.config.paths import configs_dir
from tests.helpers.command import maxbatch
from tests.helpers.sweeps import BASE, RATES, planned, write_evals, write_sweep

optuna = pytest.importorskip(
    "optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')"
)


RANGES = {
    "learning_rate": {"low": "1e-4", "high": "1e-1", "log": True},
    "opt_type": ["adamw", "lion"],
}
ON_EVALS = {"sampler": "optuna", "metric": "eval_loss", "base": BASE | {"eval_interval": 2}}


def optuna_trials(trials: int, sweep_dir: str = "sw", **settings: Any) -> Any:
    name = write_sweep(
        **({"parameters": RANGES, "sweep_dir": sweep_dir, "trials": trials} | ON_EVALS | settings)
    )
    sweep = SweepFile.read(name)
    return SweepStudy(sweep, SweepFolder(sweep.sweep_dir))


def end(source: Any, trial: Any, status: str, *losses: float) -> None:
    folder = SweepFolder(trial.folder.parent.parent)
    write_evals(trial, *losses)
    folder.finish(trial, status)
    source.finished(folder.result(trial, "eval_loss"))


def test_optuna_trials_are_as_many_as_asked_for_and_end_with_their_values() -> None:
    source = optuna_trials(4)
    for number, status in enumerate(("done", "done", "failed", "diverged")):
        trial = source.next()
        assert trial.number == number and source.is_exhausted() == (number == 3)
        assert 1e-4 <= float(trial.overrides["learning_rate"]) <= 1e-1
        end(source, trial, status, 3.0, 2.0 + number)
    assert source.next() is None and source.is_exhausted() and source.num_ended == 4
    for study in (source._study, optuna_trials(4)._study):  # and a restart knows them all
        assert [trial.state.name for trial in study.trials] == [
            "COMPLETE",
            "COMPLETE",
            "FAIL",
            "PRUNED",
        ]
        assert [trial.value for trial in study.trials[:2]] == [2.0, 3.0]
        assert float(
            SweepFolder(Path("sw")).trials()[0].overrides["learning_rate"]
        ) == pytest.approx(study.trials[0].params["learning_rate"], rel=1e-5)


def test_a_restart_suggests_what_the_first_start_would_have() -> None:
    source = optuna_trials(8)
    for number in range(7):
        end(source, source.next(), "done", 3.0, 2.0 + number % 3)
    again = optuna_trials(8)
    assert again.next().overrides == source.next().overrides


def test_a_trial_whose_eval_loss_is_above_the_others_median_is_pruned() -> None:
    source = optuna_trials(8)
    for _ in range(5):
        trial = source.next()
        write_evals(trial, 3.0, 2.0)
        assert source.should_prune(trial) is None
        end(source, trial, "done", 3.0, 2.0)
    bad, good = source.next(), source.next()
    write_evals(good, 2.9)
    write_evals(bad, 3.1)
    for study in (source, optuna_trials(8)):
        assert study.should_prune(good) is None
        assert (
            study.should_prune(bad) == "eval_loss 3.1000 at 128 tokens is above the others' median"
        )


def test_a_sweep_without_a_pruner_ends_no_trial_early() -> None:
    source = optuna_trials(8, pruner="none")
    for _ in range(5):
        end(source, source.next(), "done", 3.0, 2.0)
    bad = source.next()
    write_evals(bad, 300.0)
    assert source.should_prune(bad) is None


@pytest.mark.processes
def test_a_sweep_stops_trials_whose_eval_loss_is_above_the_others() -> None:
    base = BASE | {"steps": 100, "eval_interval": 2, "eval_fraction": "0.1"}
    source = optuna_trials(8, base=base, parallel=2)
    for _ in range(5):
        # at every eval better than any that is trained
        end(source, source.next(), "done", *[0.1] * 50)
    result = maxbatch("sweep", "sweep.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    stopped = SweepFolder(Path("sw")).results("eval_loss")[5:]
    assert [trial.status for trial in stopped] == ["pruned"] * 3
    for trial in stopped:
        assert 0 < trial.steps < 100 and "above the others' median" in trial.reason


def test_a_killed_optuna_sweep_goes_on_with_the_trials_that_it_began() -> None:
    source = optuna_trials(4)
    first, second = source.next(), source.next()
    SweepFolder(Path("sw")).finish(second, "done")
    write_evals(second, 2.5)

    again = optuna_trials(4)
    assert [trial.state.name for trial in again._study.trials] == ["RUNNING", "COMPLETE"]
    resumed, *new = again.next(), again.next(), again.next()
    assert resumed == first and [trial.number for trial in new] == [2, 3] and again.next() is None
    again.stopped(resumed)  # by a signal to its process alone
    assert not again.is_exhausted() and again.next() == first
    for trial in (resumed, *new):
        end(again, trial, "done", 3.0)
    assert again.is_exhausted() and again.num_ended == again.num_trials == 4


def test_an_unfinished_trial_of_maxbatch_0_4_is_one_line_and_no_failure() -> None:
    folder = planned(RATES)
    done, stopped = folder.trials()
    for trial in (done, stopped):
        checkpoint = trial.folder / "checkpoints" / "2"
        (checkpoint / "params").mkdir(parents=True)
        (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    sweep = SweepFile.read(write_sweep(RATES))
    folder.finish(done, "done")
    with pytest.raises(ConfigError, match=r"sw/.*/checkpoints/2: .*maxbatch==0\.5\.0") as refused:
        SweepStudy(sweep, folder)
    assert str(stopped.folder) in str(refused.value)
    folder.finish(stopped, "done")
    assert SweepStudy(sweep, folder).num_ended == 2, "a trial that ended has no need of it"


def test_an_optuna_sweep_may_have_more_trials_but_no_other_parameters() -> None:
    end(source := optuna_trials(1), source.next(), "done", 3.0)
    assert optuna_trials(2).next().number == 1
    with pytest.raises(ConfigError, match="metric: eval_loss, not loss"):
        optuna_trials(2, metric="loss")
    with pytest.raises(ConfigError, match=r"learning_rate: \{low: 0\.0001"):
        optuna_trials(2, parameters=RANGES | {"learning_rate": {"low": "1e-3", "high": "1e-1"}})
    with pytest.raises(ConfigError, match="steps=4, not 5"):
        optuna_trials(2, base=BASE | {"eval_interval": 2, "steps": 5})


def test_the_ready_sweep_is_found_by_name_and_every_combination_works() -> None:
    sweep = SweepFile.read("batch_size")
    assert sweep.path == configs_dir() / "sweeps" / "batch_size.yml"
    study = SweepStudy(sweep, folder := SweepFolder(Path("sw")))
    assert len(list(iter(study.next, None))) == 12 and study.is_exhausted()
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
    assert (
        overrides_of(planned(parameters, sampler="random", trials=5, sweep_dir="more"))[:3] == few
    )
    assert (
        overrides_of(planned(parameters, sampler="random", trials=3, sweep_dir="other", seed=1))
        != few
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    swept = SweepFile.read("sweep.yml").parameters
    drawn = [
        {p.key.name: p.suggest(trial) for p in swept} for trial in (study.ask() for _ in range(200))
    ]
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
        (
            {"learning_rate": ["1e-3"]},
            {},
            {},
            r"learning_rate=0\.003 \(trial 1\), which parameters no longer hold",
        ),
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
def test_a_sweep_that_another_version_began_goes_on(sampler: str) -> None:
    swept = (
        RATES
        if sampler == "grid"
        else {"learning_rate": {"low": "1e-4", "high": "1e-2", "log": True}}
    )
    settings: dict[str, Any] = {"sampler": sampler} | ({"trials": 2} if sampler == "random" else {})
    folder = planned(swept, **settings)
    first, second = folder.trials()
    if sampler == "random":  # numbers that another generator drew
        second = folder.add(
            1, {"learning_rate": "0.00123"}, {**second.config, "learning_rate": "0.00123"}
        )
    write_evals(first, 3.0)
    folder.finish(first, "done")
    study = SweepStudy(SweepFile.read("sweep.yml"), folder)
    assert study.next() == second and study.next() is None
    assert study.is_exhausted() and folder.trials() == [first, second]


def test_a_trial_whose_folder_was_removed_runs_again() -> None:
    folder = planned(RATES)
    first, second = folder.trials()
    shutil.rmtree(first.folder)
    again = planned(RATES).trials()
    assert [trial.overrides for trial in again] == [first.overrides, second.overrides]


def test_a_failed_trial_is_retried_and_one_that_diverged_is_not() -> None:
    folder = planned(RATES)
    failed, diverged = folder.trials()
    folder.finish(failed, "failed", "no disk")
    folder.finish(diverged, "diverged", "9 updates in a row")
    sweep = SweepFile.read("sweep.yml")
    assert SweepStudy(sweep, folder).is_exhausted()
    forget_failed(folder, "loss")
    study = SweepStudy(sweep, folder)
    assert study.next() == failed and study.next() is None
    folder.finish(failed, "done")
    study.finished(folder.result(failed, "loss"))
    assert study.is_exhausted()
