"""Sweep files, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.around.sweep.study import SweepStudy
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.cli import main

pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'maxbatch[sweep]')")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("paralel: 2", "unknown key; nearest: parallel"),
        ("foo: 2", "foo: unknown key; one of sampler, metric, "),
        ("learning_rate: 1", "is a config key, which belongs under base or parameters"),
        ("sampler: bayes", "sampler=bayes: must be one of grid, random, optuna; works: sampler="),
        ("metric: loos", "metric=loos: must be one of eval_loss, loss; works: metric=loss"),
        ("parallel: 0", "parallel=0: must be at least 1; works: parallel=1"),
        ("parallel: [1]", "parallel takes one value"),
        ("sampler: random", "trials must be a number"),
        ("trials: 3", "trials=3: must not be given for a grid"),
        (
            "storage: sqlite:///x.db",
            "storage: is a database that several machines shared with maxbatch 0.4, which this "
            "version does not read; maxbatch==0.5.0 still reads it",
        ),
        ("base: {run_dir: x}", "run_dir: each trial has its own"),
        ("base: 3", "must be lines of `key: value`"),
        ("base: {stepz: 3}", "unknown key stepz; nearest: steps"),
        ("base: {steps: ten}", "steps=ten: must be a whole number"),
        ("base: {eval_interval: -1}\nmetric: eval_loss", "metric=eval_loss needs evals"),
        ("parallel: 1\nparallel: 2", "parallel is stated twice"),
        ("a: [", "is not valid YAML"),
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
        (
            "{learning_rate: [3e-3, 0.003]}",
            "learning_rate=0.003: must be in its list once; works: [0.003]",
        ),
        ("{steps: {low: 1}}", "a range must state low and high"),
        (
            "{global_batch_size: {low: 1Mit, high: 2Mit}}",
            "must be numbers of samples; works: a list, [1Mit, 2Mit]",
        ),
        ("{steps: {low: 1, high: 2, lag: true}}", "unknown key lag of a range; nearest: log"),
        ("{steps: {low: 5, high: 2}}", "low=5 must be less than high=2; works: {low: 2, high: 5}"),
        ("{steps: {low: 1, high: 9}}", "a grid needs a list of values, or a step; works: [1, 9]"),
        (
            "{steps: {low: 1, high: 9, step: 0.5}}",
            "step=0.5 must be a whole number greater than 0; works: step: 1",
        ),
        (
            "{steps: {low: 1, high: 9, step: 10}}",
            "step=10 must be at most high - low; works: step: 8",
        ),
        ("{steps: {low: 1, high: 9, log: 3}}", "log=3 must be true or false; works: log: true"),
        (
            "{steps: {low: 1, high: 9, log: true, step: 1}}",
            "step=1 must not be given where log is true",
        ),
        (
            "{adam_b1: {low: 0, high: 0.9, log: true}}",
            "low=0 must be greater than 0 where log is true",
        ),
        ("{dtype: {low: 1, high: 9}}", "dtype: takes no numbers"),
        (
            "{steps: {low: 1, high: 900000, step: 1}, eval_steps: [1]}",
            "more than 10,000; works: step: ",
        ),
    ],
)
def test_bad_parameters_are_refused_with_what_works(parameters: str, said: str) -> None:
    Path("sweep.yml").write_text(f"metric: loss\nparameters: {parameters}\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        SweepStudy(sweep := SweepFile.read("sweep.yml"), SweepFolder(sweep.sweep_dir))
    assert not Path("runs").exists()


def test_a_missing_file_names_a_ready_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "nowhere.yml"]) == 2
    assert "nowhere.yml: does not exist; a ready one: batch_size" in capsys.readouterr().err


def test_a_base_config_whose_name_no_file_system_holds_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.yml").write_text(
        f"base:\n  base_config: {'9' * 4000}\nparameters:\n  learning_rate: [1e-3]\n"
    )
    sweep = SweepFile.read(str(tmp_path / "sweep.yml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        sweep.resolved({"learning_rate": "1e-3"})
