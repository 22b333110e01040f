"""Folders of runs and sweeps that never ran, and figures; shared by the tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxbatch import load_config
from maxbatch.around.pages.plots import BatchCurve
from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.config.loading import dump_config


def write_run(path: Path, steps: int, *overrides: str, **columns: Any) -> list[dict[str, Any]]:
    """Write the folder of a run that never ran; of `columns`, a function of the step each."""
    path.mkdir(parents=True)
    (path / "config.yml").write_text(
        dump_config(load_config(overrides=[f"run_dir={path}", *overrides]))
    )
    records = [
        {
            "step": step,
            "samples_seen": 16 * step,
            "tokens_seen": 512 * step,
            "global_batch_size": 16,
            "stage": 0,
            "loss": 5 / step + 0.1234567890123,
            "learning_rate": 1e-3 / step,
            "grad_norm": 1.5,
            "step_time_s": 0.25,
            "tokens_per_second": 2048.0,
            "mfu": None,
        }
        for step in range(1, steps + 1)
    ]
    for record in records:
        for name, function in columns.items():
            value = function(record["step"])
            if value is not ...:
                record[name] = value
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


CURVES = [
    BatchCurve("step 100", [8, 16, 32], [3.0, 3.01, 3.2], 3.05, 16),
    BatchCurve("step 400", [8, 16, 32], [2.5, 2.5, None], 2.55, None),
]
TRIALS = [
    ({"global_batch_size": b, "learning_rate": r}, float(b) + float(r), f"trial {b} {r}")
    for b in ("8", "16")
    for r in ("0.001", "0.01")
]


def make_sweep() -> SweepFolder:
    folder = SweepFolder(Path("sw"))
    for number, rate in enumerate(("0.001", "0.01", "0.1")):
        write_run(folder.trial_folder(number), 4, f"learning_rate={rate}")
        trial = folder.add(number, {"learning_rate": rate}, {})
        folder.finish(trial, *(("failed", "no <luck>") if number == 2 else ("done", "")))
    folder.write(
        {
            "sampler": "grid",
            "metric": "loss",
            "seed": 0,
            "parameters": {"learning_rate": []},
            "log_keys": ["learning_rate"],
        }
    )
    return folder
