"""Stores whose listings lag behind writes: nothing is lost, repeated or read wrongly."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.runs.position import committed_steps
from maxbatch.runs.sweep_folder import SweepFolder
from maxbatch.system.storage import as_path, clone_tree
from maxbatch.training.pretraining import train
from tests.helpers.stores import Store
from tests.helpers.tiny import TINY_RUN, assert_same_run, tiny_config

RUN = (
    *TINY_RUN, "per_device_batch_size=1", "base_num_decoder_layers=1", "checkpoint_period=2",
    "learning_rate_schedule=constant", "warmup_steps_fraction=0",
)  # fmt: skip


def test_a_run_goes_on_from_a_checkpoint_that_no_listing_shows_yet(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, whole = store.bucket() + "/run", tmp_path / "whole"
    train(tiny_config(*RUN, "steps=6", f"run_dir={whole}"))
    store.plan(lag_s=1.0)
    train(tiny_config(*RUN, "steps=4", f"run_dir={run_dir}"))
    store.plan(lag_s=600.0)  # nothing is listed
    soon = threading.Timer(4.0, lambda: store.plan(lag_s=1.0))
    soon.start()
    train(tiny_config(*RUN, "steps=6", f"run_dir={run_dir}"))
    soon.join()
    assert "resumed at step 4" in capsys.readouterr().out
    assert committed_steps(as_path(run_dir)) == [6, 4, 2]
    there, here = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (as_path(run_dir), whole)
    )
    assert_same_run(there, here)
    assert main(["report", run_dir, "--output", "page.html"]) == 0


def test_a_copy_a_sweep_and_a_prepared_dataset_are_whole_at_once(store: Store, tmp_path: Path) -> None:
    bucket = store.bucket()
    source = as_path(f"{bucket}/source")
    with store.failing(lag_s=1.5):
        for name in ("a/b", "c", "last"):
            (source / name).write_bytes(name.encode())
        clone_tree(source, as_path(f"{bucket}/copy"), last="last")
    assert [(as_path(f"{bucket}/copy") / name).read_bytes() for name in ("a/b", "c", "last")] == [b"a/b", b"c", b"last"]
    with store.failing(lag_s=600.0):
        folder = SweepFolder(as_path(f"{bucket}/sweep"))
        for number in range(3):
            folder.add(number, {"learning_rate": f"0.{number + 1}"}, None)
        assert [trial.number for trial in folder.trials()] == [0, 1, 2]
        (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 50)
        output = ["--output", f"{bucket}/tokens"]
        assert main(["prepare", "dataset_type=jsonl", f"dataset_path={tmp_path}/a.jsonl", *output]) == 0
        assert main(["data", "dataset_type=tokens", f"dataset_path={bucket}/tokens", "max_target_length=8"]) == 0
