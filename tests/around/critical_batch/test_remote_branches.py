"""A measurement of a run in an object store."""

from __future__ import annotations

import json

import pytest

from maxbatch.cli import main
from maxbatch.run.pretraining import train
from maxbatch.system.storage.storage import as_path
from tests.helpers.stores import Store, on
from tests.helpers.tiny import one_layer_config


@pytest.mark.slow
@on("s3")
def test_branches_of_a_run_in_a_bucket_fork_from_copies_there(store: Store) -> None:
    run_dir = store.bucket() + "/run"
    keys = ("global_batch_size=8", "per_device_batch_size=16", "steps=32", "checkpoint_period=16")
    length = (
        "max_num_checkpoints_to_keep=null",
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
    )
    train(one_layer_config(*keys, *length, f"run_dir={run_dir}"))
    flags = "--checkpoints 16 --factors 1,2 --samples 128 --tolerance 9 --simulate-devices 1"
    assert main(["critical-batch", run_dir, *flags.split()]) == 0
    found = json.loads((as_path(run_dir) / "critical-batch" / "critical_batch.json").read_text())
    (fork,) = found["checkpoints"]
    assert [branch["batch_size"] for branch in fork["branches"]] == [8, 16]
    records = [
        json.loads(line) for line in (as_path(run_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    base = as_path(fork["branches"][0]["folder"])
    lines = [json.loads(line) for line in (base / "metrics.jsonl").read_text().splitlines()]
    of_base = lines[16:]  # those before are the run's
    assert [one["loss"] for one in of_base] == pytest.approx(
        [one["loss"] for one in records[16:32]], abs=2e-4
    )
    assert [one["data_fingerprint"] for one in of_base] == [
        one["data_fingerprint"] for one in records[16:32]
    ]
    assert not (base / "checkpoints").exists()
