"""The benchmarks run end to end, with machine-readable output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import audits, evaluate, gpu, schedules
from benchmarks.measurement import BenchmarkError, Measurement, ratio
from benchmarks.same_run import results as same_run
from benchmarks.same_run import scores
from benchmarks.same_run.cases import CASES
from benchmarks.same_run.figures import Update, differences
from benchmarks.trainer import QUICK_MODEL
from maxbatch import BatchPlan, load_config
from tests import test_gpu

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
def test_quick_benchmarks_write_every_figure_with_its_bar(tmp_path):
    results = tmp_path / "results.json"
    command = (
        sys.executable,
        "-m",
        "benchmarks",
        "step",
        "feed",
        "--quick",
        "--json",
        str(results),
    )
    # JAX's own promotion of ranks and dtypes: what is compared with is written as others write.
    lenient = {"JAX_NUMPY_RANK_PROMOTION": "allow", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | lenient
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "whole loop, accumulation 1" in done.stdout
    written = json.loads(results.read_text())
    assert written["quick"] is True
    assert list(written["benchmarks"]) == ["step", "feed"]
    for records in written["benchmarks"].values():
        for record in records:
            assert record["min"] <= record["median"] <= record["max"]
            assert record["value"] > 0
            assert record["bar"] is record["passed"] is None  # tiny sizes measure nothing


@pytest.mark.parametrize(
    ("sense", "value", "passed"),
    [
        ("at least", 0.97, True),
        ("at least", 0.96, False),
        ("at most", 1.1, True),
        ("at most", 1.2, False),
    ],
)
def test_a_bar_is_reached_on_its_own_side(sense, value, passed):
    bar = 0.97 if sense == "at least" else 1.1
    assert Measurement("", value, bar=bar, sense=sense).passed is passed
    assert Measurement("", value, sense=sense).passed is None


def test_a_figure_that_is_no_number_reaches_no_bar():
    assert Measurement("", float("nan"), bar=1.0).passed is False


def test_a_gpu_passes_no_test_without_a_bar():
    without, reached = Measurement("a", 1.0), Measurement("b", 1.0, bar=2.0)
    test_gpu.assert_passed([without, reached])
    for figures in ([], [without], [without, reached, Measurement("c", 3.0, bar=2.0)]):
        with pytest.raises(AssertionError):
            test_gpu.assert_passed(figures)


def test_ratio_is_of_medians_with_the_turns_as_its_spread():
    measured = ratio("", [2.0, 4.0, 30.0], [1.0, 2.0, 3.0], scale=0.5)
    assert measured.value == 1.0
    assert list(measured.samples) == [1.0, 1.0, 5.0]


def test_unknown_benchmark_is_refused_by_name():
    command = (sys.executable, "-m", "benchmarks", "spead")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "spead" in done.stderr


@pytest.mark.runs
def test_without_a_gpu_nothing_is_measured(capsys):
    assert gpu.measure(quick=True) == [] and "no GPU here" in capsys.readouterr().out


@pytest.mark.usefixtures("standard_promotion")
def test_the_plain_path_does_not_differ_from_itself():
    differences = gpu.attention_differences("dot_product", length=16, head_dim=8)
    assert differences.keys() == {
        "values",
        *(f"gradient by the {name}" for name in ("query", "key", "value")),
    }
    assert set(differences.values()) == {0.0}


@pytest.mark.parametrize(("memory_gb", "layers"), [(10, 1), (72, 14), (1000, 32)])
def test_as_many_layers_of_a_7b_are_trained_as_fit(memory_gb, layers):
    assert gpu.layers_that_fit(memory_gb * 10**9) == layers


def test_times_of_different_computations_are_not_compared():
    gpu.check_losses([5.0, 4.9, 4.8, 1.0], [5.01, 4.9, 4.8, 2.0])
    with pytest.raises(BenchmarkError, match="update 2"):
        gpu.check_losses([5.0, 4.9, 4.8], [5.0, 5.1, 4.8])


@pytest.mark.processes
@pytest.mark.usefixtures("standard_promotion")
def test_the_update_by_hand_has_the_losses_of_the_trainer(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    keys = (*QUICK_MODEL, "per_device_batch_size=4", "remat_policy=full", "scan_layers=true")
    figures = gpu.speed(
        gpu.Bench(tmp_path, "cpu"), gpu.Gpu("NVIDIA H100 80GB HBM3", 0), "tiny", keys, updates=4
    )
    assert len(figures) == 5 and all(figure.value > 0 for figure in figures)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.usefixtures("standard_promotion")
def test_evaluate_and_score_come_to_the_same_accuracy_and_are_compared():
    assert [figure.bar for figure in evaluate.measure(quick=True)] == [evaluate.BAR] * 2


def test_the_schedules_compared_have_the_same_samples_and_the_updates_that_the_page_states():
    page = (ROOT / "docs" / "schedules-experiment.md").read_text()
    for arm, keys in schedules.ARMS.items():
        plan = BatchPlan.from_config(load_config(overrides=[*schedules.KEYS, *keys]), 1)
        assert plan.total_samples == schedules.SAMPLES
        updates = f"{sum(stage.num_steps for stage in plan.stages):,}"
        assert re.search(rf"^\| {arm} \|.*\| {updates} \|$", page, re.M), (arm, updates)


def test_the_tests_of_the_schedules_are_those_of_scipy():
    above, below = [1.51, 1.525, 1.53, 1.518, 1.522], [1.5, 1.52, 1.531, 1.51, 1.52]
    found = schedules.difference(above, below)
    expected = stats.ttest_rel(above, below)
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        tuple(interval)
    )
    sides = [
        stats.ttest_rel([a - margin for a in above], below, alternative=side).pvalue
        for margin, side in ((0.01, "less"), (-0.01, "greater"))
    ]
    assert found.p_equal == pytest.approx(max(sides))
    signs = stats.permutation_test(
        (above, below), lambda a, b: np.mean(a - b), permutation_type="samples"
    )
    assert found.p_signs == pytest.approx(signs.pvalue)


def test_holm_multiplies_each_p_by_the_hypotheses_left_and_keeps_their_order():
    assert schedules.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx(
        {"a": 0.06, "b": 0.03, "c": 0.06}
    )


@pytest.mark.parametrize(
    ("mean", "p", "p_equal", "answer"),
    [
        (0.001, 0.5, 0.01, "as good"),
        (0.004, 0.01, 0.01, "worse, within the margin"),
        (-0.004, 0.01, 0.01, "better, within the margin"),
        (0.02, 0.01, 0.9, "worse"),
        (-0.02, 0.01, 0.9, "better"),
        (0.02, 0.5, 0.5, "undecided"),
    ],
)
def test_a_schedule_is_answered_by_the_table_that_was_fixed_before(mean, p, p_equal, answer):
    assert schedules.verdict(mean, p, p_equal) == answer


def test_the_page_of_other_trainers_has_the_table_of_their_results():
    page = audits.PAGE.read_text()
    assert (
        page[page.index(audits.BEGIN) + len(audits.BEGIN) : page.index(audits.END)]
        == audits.table()
    )
    examples = {path.name for path in (audits.ROOT / "examples" / "audits").glob("*.py")}
    assert {peer.adapter.split(":")[0] for peer in audits.PEERS.values()} | {
        "torch_model.py"
    } == examples


def test_the_page_of_imports_has_the_table_of_the_runs_beside_other_programs():
    page = same_run.PAGE.read_text()
    written = page[page.index(same_run.BEGIN) + len(same_run.BEGIN) : page.index(same_run.END)]
    assert written == same_run.table()
    assert {path.stem for path in same_run.FOLDER.glob("*.json")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_within_the_tolerances_or_its_row_names_the_difference(name):
    figures = same_run.load(name)["differences"]
    beyond = [
        each for each, figure in figures.items() if not figure <= getattr(same_run.TOLERANCES, each)
    ]
    assert bool(beyond) == bool(CASES[name].differs), beyond


def test_differences_of_two_runs_are_the_largest_of_their_figures_and_arrays():
    theirs = [Update(2.0, 1.0, 0.01), Update(4.0, 2.0, 0.005)]
    ours = [Update(2.0, 1.1, 0.01), Update(4.2, 2.0, 0.0045)]
    start = {"a": np.zeros(4, np.float32), "b": np.zeros(2, np.float32)}
    their_end = {"a": np.array([1.0, 0, 0, 0], np.float32), "b": np.array([3.0, 4.0], np.float32)}
    our_end = {"a": np.array([1.0, 0, 0, 7.0], np.float32), "b": np.array([3.0, 4.5], np.float32)}
    # the last of a is rounding alone
    squares = {"a": np.array([1.0, 1.0, 1.0, 1e-16]), "b": np.ones(2)}
    found = differences(ours, theirs, start, our_end, their_end, squares)
    assert (found.loss, found.grad_norm, found.rate) == pytest.approx((0.05, 0.1, 0.05))
    assert (dict(found.arrays), found.left_out) == (pytest.approx({"a": 0.0, "b": 0.1}), 1)
    assert found.beyond(same_run.TOLERANCES) == ["loss", "grad_norm", "rate", "array"]


def test_the_page_shows_the_scores_of_maxtexts_checkpoints_which_are_within_their_bar() -> None:
    assert scores.BEGIN + scores.table() + scores.END in scores.PAGE.read_text()
    assert scores.figures()
    assert max(figure for row in scores.figures().values() for figure in row.values()) <= scores.BAR
