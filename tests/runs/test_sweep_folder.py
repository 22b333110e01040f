"""The folder of a sweep: the metric of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxbatch.runs.outcome import Status
from maxbatch.runs.sweep_folder import SweepFolder, metric_value


def test_the_metric_is_the_last_eval_or_the_mean_of_the_last_tenth() -> None:
    records: list[dict[str, Any]] = [{"loss": float(i)} for i in range(100)]
    records[49]["eval_loss"], records[98]["eval_loss"] = 3.0, 2.0
    assert metric_value(records, "eval_loss") == 2.0
    assert metric_value(records, "loss") == 94.5
    records[95]["loss"] = None
    assert metric_value(records, "loss") is None and metric_value([], "loss") is None


def test_trials_of_different_batches_are_also_compared_at_equal_tokens() -> None:
    folder = SweepFolder(Path("sw"))
    for number, (batch, losses) in enumerate([(1, [5.0, 4.0, 3.0, 2.0]), (2, [4.5, 2.5, 1.5, 0.5])]):
        trial = folder.add(number, {"global_batch_size": str(batch)}, None)
        lines = [
            {"step": step, "samples_seen": batch * step, "tokens_seen": 8 * batch * step, "global_batch_size": batch,
             "stage": 0, "loss": loss, "learning_rate": 1e-3, "loss_weight": 1.0}
            for step, loss in enumerate(losses, start=1)
        ]  # fmt: skip
        (trial.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder.finish(trial, Status.DONE)
    best, other = folder.results("loss")
    assert (best.trial.number, best.value, best.tokens, best.at_equal_tokens) == (1, 0.5, 64, 2.5)
    assert (other.trial.number, other.value, other.tokens, other.at_equal_tokens) == (0, 2.0, 32, 2.0)
