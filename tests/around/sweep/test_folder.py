"""The folder of a sweep: the metric of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxbatch.around.sweep.folder import SweepFolder, at_the_edge, metric_value
from maxbatch.run.folder.outcome import Status


def test_the_metric_is_the_last_eval_or_the_mean_of_the_last_tenth() -> None:
    records: list[dict[str, Any]] = [{"loss": float(i)} for i in range(100)]
    records[49]["eval_loss"], records[98]["eval_loss"] = 3.0, 2.0
    assert metric_value(records, "eval_loss") == 2.0
    assert metric_value(records, "loss") == 94.5
    records[95]["loss"] = None
    assert metric_value(records, "loss") is None and metric_value([], "loss") is None


def test_trials_of_different_batches_are_also_compared_at_equal_tokens() -> None:
    folder = SweepFolder(Path("sw"))
    for number, (batch, losses) in enumerate(
        [(1, [5.0, 4.0, 3.0, 2.0]), (2, [4.5, 2.5, 1.5, 0.5])]
    ):
        trial = folder.add(number, {"global_batch_size": str(batch)}, None)
        lines = [
            {
                "step": step,
                "samples_seen": batch * step,
                "tokens_seen": 8 * batch * step,
                "global_batch_size": batch,
                "stage": 0,
                "loss": loss,
                "learning_rate": 1e-3,
                "loss_weight": 1.0,
            }
            for step, loss in enumerate(losses, start=1)
        ]
        (trial.folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        folder.finish(trial, Status.DONE)
    best, other = folder.results("loss")
    assert (best.trial.number, best.value, best.tokens, best.at_equal_tokens) == (1, 0.5, 64, 2.5)
    assert (other.trial.number, other.value, other.tokens, other.at_equal_tokens) == (
        0,
        2.0,
        32,
        2.0,
    )


@pytest.mark.parametrize(
    ("space", "value", "said"),
    [
        ({"low": "1e-4", "high": "1e-2", "log": True}, "0.0095", "high end of its range"),
        ({"low": "1e-4", "high": "1e-2", "log": True}, "0.00011", "low end of its range"),
        ({"low": "1e-4", "high": "1e-2", "log": True}, "0.001", None),
        ({"low": "0.001", "high": "0.003", "log": False}, "0.002", None),
        (["0.001", "0.003", "0.01"], "0.01", "largest of its list"),
        (["0.001", "0.003", "0.01"], "0.001", "smallest of its list"),
        (["0.001", "0.003", "0.01"], "0.003", None),
        (["0.001"], "0.001", None),
    ],
)
def test_a_best_trial_at_the_edge_of_the_space_is_pointed_out(
    space: object, value: str, said: str | None
) -> None:
    sentences = at_the_edge({"learning_rate": space}, {"learning_rate": value})
    expected = (
        f"the best trial has learning_rate={value}, the {said}: better ones may lie beyond it"
    )
    assert sentences == ([expected] if said else [])
    assert at_the_edge({"opt_type": ["adamw", "lion"]}, {"opt_type": "lion"}) == []


def test_a_sweep_as_data_has_its_numbers_as_numbers(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    parameters = {
        "learning_rate": {"low": "0.001", "high": "0.01", "log": True},
        "global_batch_size": ["8", "16"],
        "packing": ["true", "false"],
        "opt_type": ["adamw"],
    }
    folder.write(
        {"sampler": "random", "metric": "loss", "seed": 0, "parameters": parameters, "log_keys": []}
    )
    texts = {
        "learning_rate": "0.002",
        "global_batch_size": "16",
        "packing": "true",
        "opt_type": "adamw",
    }
    folder.add(0, texts, None)
    found = folder.to_dict()
    values = {"learning_rate": 0.002, "global_batch_size": 16, "packing": True, "opt_type": "adamw"}
    assert found["trials"][0]["overrides"] == values
    assert found["parameters"] == {
        "learning_rate": {"low": 0.001, "high": 0.01, "log": True},
        "global_batch_size": [8, 16],
        "packing": [True, False],
        "opt_type": ["adamw"],
    }
