"""Sweep files and their plans, shared by the tests of sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from maxbatch.around.sweep.folder import SweepFolder, Trial
from maxbatch.around.sweep.study import SweepStudy
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.system.storage.locks import take_lock
from tests.helpers.tiny import ONE_LAYER, TINY_RUN

BASE = dict(pair.split("=", 1) for pair in (*TINY_RUN, ONE_LAYER)) | {
    "steps": 4,
    "per_device_batch_size": 2,
}


def write_sweep(parameters: Any, base: dict[str, Any] | None = None, **settings: Any) -> str:
    """Write sweep.yml into the current folder."""
    sweep = {
        "metric": "loss",
        "sweep_dir": "sw",
        "base": BASE | (base or {}),
        "parameters": parameters,
    }
    Path("sweep.yml").write_text(yaml.safe_dump(sweep | settings, sort_keys=False))
    return "sweep.yml"


def planned(parameters: Any, base: dict[str, Any] | None = None, **settings: Any) -> SweepFolder:
    """Take all trials of a sweep as the command does, without running them."""
    sweep = SweepFile.read(write_sweep(parameters, base, **settings))
    folder = SweepFolder(sweep.sweep_dir)
    list(iter(SweepStudy(sweep, folder).next, None))
    return folder


RATES = {"learning_rate": ["1e-3", "3e-3"]}


def wait_until_free(folder: SweepFolder) -> None:
    """Wait until the command of a sweep and all of its trials have ended."""
    lock = take_lock(folder.path / ".lock", 120)
    assert lock is not None, f"a trial in {folder.path} is still being trained"
    lock.close()


def write_evals(trial: Trial, *losses: float) -> None:
    """Writes the records of a trial: an eval every second update."""
    fixed = {"global_batch_size": 2, "stage": 0, "loss": 1.0, "learning_rate": 1e-3}
    lines: list[dict[str, Any]] = [
        {"step": step, "samples_seen": 2 * step, "tokens_seen": 64 * step, **fixed}
        for step in range(1, 2 * len(losses) + 1)
    ]
    for number, loss in enumerate(losses, start=1):
        lines[2 * number - 1]["eval_loss"] = loss
    (trial.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
