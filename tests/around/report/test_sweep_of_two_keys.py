"""A report of a sweep of two keys: its trials are named by their values, its numbers are drawn."""

from __future__ import annotations

import json
from pathlib import Path

from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.cli import main


def test_a_sweep_of_two_keys_is_reported_with_its_values(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sw")
    folder.path.mkdir()
    parameters = {"learning_rate": ["0.001", "0.01"], "global_batch_size": ["8", "16"]}
    folder.write(
        {"sampler": "grid", "metric": "loss", "seed": 0, "parameters": parameters, "log_keys": []}
    )
    for number, (rate, batch) in enumerate(
        [("0.001", "8"), ("0.01", "8"), ("0.001", "16"), ("0.01", "16")]
    ):
        trial = folder.add(number, {"learning_rate": rate, "global_batch_size": batch}, None)
        lines = [
            {
                "step": step,
                "samples_seen": 8 * step,
                "tokens_seen": 64 * step,
                "global_batch_size": 8,
                "stage": 0,
                "loss": 3.0 - number / 10,
                "learning_rate": 1e-3,
                "loss_weight": 1.0,
                "step_time_s": 0.1,
            }
            for step in (1, 2)
        ]
        (trial.folder / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in lines)
        )
        folder.finish(trial, "done")
    assert main(["report", str(folder.path), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "3: 0.01, 16" in page
    assert (
        "The best trial has learning_rate=0.01, the largest of its list: better ones may lie "
        "beyond it." in page
    )
