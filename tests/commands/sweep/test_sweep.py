"""Sweep files, what they refuse, and which trials they make."""

from __future__ import annotations

import re
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from maxbatch import ConfigError
from maxbatch.cli import main
from maxbatch.commands.sweep.space import Choices, Range
from maxbatch.commands.sweep.study import SweepStudy
from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.config.loading import configs_dir, keys
from maxbatch.runs.sweep_folder import SweepFolder, metric_value
from tests.helpers.sweeps import RATES, planned, wait_until_free, write_evals

optuna = pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("paralel: 2", "unknown key; nearest: parallel"),
        ("learning_rate: 1", "is a config key, which belongs under base or parameters"),
        ("sampler: bayes", "sampler=bayes: must be one of grid, random, optuna; works: sampler="),
        ("metric: loos", "metric=loos: must be one of eval_loss, loss; works: metric=loss"),
        ("parallel: 0", "parallel=0: must be at least 1; works: parallel=1"),
        ("parallel: [1]", "parallel takes one value"),
        ("sampler: random", "trials must say how many"),
        ("trials: 3", "trials=3: must not be given for a grid"),
        ("storage: sqlite:///x.db", "storage=sqlite:///x.db: must not be given where sampler is grid"),
        ("base: {run_dir: x}", "run_dir: each trial has its own"),
        ("base: 3", "must be lines of `key: value`"),
        ("base: {stepz: 3}", "unknown key stepz; nearest: steps"),
        ("base: {steps: ten}", "steps=ten: must be a whole number"),
        ("base: {eval_interval: -1}\nmetric: eval_loss", "metric=eval_loss needs evals"),
        ("parallel: 1\nparallel: 2", "parallel is stated twice"),
        ("a: [", "is no valid YAML"),
    ],
)
def test_a_bad_sweep_file_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    Path("sweep.yml").write_text(f"parameters: {{learning_rate: [1e-3]}}\n{text}\n")
    assert main(["sweep", "sweep.yml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert said in captured.err and "sweep.yml" in captured.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("{}", "must hold at least one config key"),
        ("{learning_rat: [1]}", "unknown config key learning_rat; nearest: learning_rate"),
        ("{run_dir: [a]}", "run_dir cannot be swept"),
        ("{steps: []}", "a list must hold at least one value"),
        ("{steps: 3}", "steps=3: must be a list of values or {low, high, log}; works: [3]"),
        ("{steps: [3, x]}", "steps=x: must be a whole number"),
        ("{learning_rate: [3e-3, 0.003]}", "learning_rate=0.003: must be in its list once; works: [0.003]"),
        ("{steps: {low: 1}}", "a range must state low and high"),
        ("{steps: {low: 1, high: 2, lag: true}}", "unknown key lag of a range; nearest: log"),
        ("{steps: {low: 5, high: 2}}", "low=5 must be less than high=2; works: {low: 2, high: 5}"),
        ("{steps: {low: 1, high: 9}}", "a grid needs a list of values, or a step; works: [1, 9]"),
        ("{steps: {low: 1, high: 9, step: 0.5}}", "step=0.5 must be a whole number greater than 0; works: step: 1"),
        ("{steps: {low: 1, high: 9, step: 10}}", "step=10 must be at most high - low; works: step: 8"),
        ("{steps: {low: 1, high: 9, log: 3}}", "log=3 must be true or false; works: log: true"),
        ("{steps: {low: 1, high: 9, log: true, step: 1}}", "step=1 must not be given where log is true"),
        ("{adam_b1: {low: 0, high: 0.9, log: true}}", "low=0 must be greater than 0 where log is true"),
        ("{dtype: {low: 1, high: 9}}", "dtype: takes no numbers"),
        ("{steps: {low: 1, high: 900000, step: 1}, eval_steps: [1]}", "more than 10,000; works: step: "),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_with_what_works(parameters: str, said: str) -> None:
    Path("sweep.yml").write_text(f"metric: loss\nparameters: {parameters}\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        SweepStudy(sweep := SweepFile.read("sweep.yml"), SweepFolder(sweep.sweep_dir))
    assert not Path("runs").exists()


def test_a_missing_file_names_a_ready_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "nowhere.yml"]) == 2
    assert "nowhere.yml: does not exist; a ready one: batch_size" in capsys.readouterr().err


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


def test_a_grid_with_a_step_is_exact() -> None:
    key = keys()["warmup_steps_fraction"]
    assert Range.read(key, "0", "0.3", False, "0.1").grid() == ["0.0", "0.1", "0.2", "0.3"]
    assert Range.read(keys()["steps"], "2", "9", False, "3").grid() == ["2", "5", "8"]
    assert Range.read(key, "0", "1", False, "0.25").step == Fraction(1, 4)


@pytest.mark.parametrize(
    ("name", "texts", "is_log"),
    [
        ("global_batch_size", ["8", "16", "32"], True),
        ("learning_rate", ["1e-3", "3e-3", "1e-2"], True),
        ("steps", ["1", "2", "3"], False),
        ("opt_type", ["adamw", "lion", "sgd"], False),
        ("global_batch_size", ["null", "16", "32"], False),
    ],
)
def test_lists_that_grow_by_a_ratio_are_drawn_on_a_logarithmic_axis(
    name: str, texts: list[str], is_log: bool
) -> None:
    assert Choices.read(keys()[name], [(text, True) for text in texts]).is_log == is_log


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


def test_a_trial_is_claimed_by_one_process_at_a_time() -> None:
    (trial, _) = planned(RATES).trials()
    claim = trial.claim()
    assert claim is not None and trial.claim() is None
    claim.close()
    wait_until_free(trial)


def test_the_metric_is_the_last_eval_or_the_mean_of_the_last_tenth() -> None:
    records: list[dict[str, Any]] = [{"loss": float(i)} for i in range(100)]
    records[49]["eval_loss"], records[98]["eval_loss"] = 3.0, 2.0
    assert metric_value(records, "eval_loss") == 2.0
    assert metric_value(records, "loss") == 94.5
    records[95]["loss"] = None
    assert metric_value(records, "loss") is None and metric_value([], "loss") is None


def test_a_sweep_without_optuna_or_plotly_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planned(RATES)
    for number, trial in enumerate(folder.trials()):
        write_evals(trial, 3.0 - number)
        folder.finish(trial, "done")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["sweep", "sweep.yml"]) == 0
    out = capsys.readouterr().out
    assert "best: trial 0, loss 1.0000" in out and "pip install 'maxbatch[report]'" in out
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "sweep.yml"]) == 2
    error = capsys.readouterr().err
    assert error == "maxbatch: error: maxbatch sweep needs Optuna; works: pip install 'maxbatch[sweep]'\n"


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
