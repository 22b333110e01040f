"""The folder of a sweep: claims on trials, and the metric of a run."""

from __future__ import annotations

from typing import Any

from maxbatch.runs.sweep_folder import metric_value
from tests.helpers.sweeps import RATES, planned, wait_until_free


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
