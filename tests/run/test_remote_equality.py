"""The same run in any place and on any number of hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.config.loading import load_config
from maxbatch.parallel.hosts import together
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.pretraining import train
from maxbatch.system.errors import report
from maxbatch.system.storage.storage import AnyPath, as_path, copy_tree
from maxbatch.testing import Pod, run
from tests.helpers.stores import Store
from tests.helpers.tiny import assert_same_run, tiny_config
from tests.run.test_remote_runs import RAMPED, names, records

STEPS = [6, 3]  # of the checkpoints, the newest first
ITEMS = {"params", "opt_state", "position"}


def keys_of(place: str, run: str) -> list[str]:
    """A ramp over prepared tokens; tokens and run are in the same place."""
    data = ("dataset_type=tokens", f"dataset_path={place}/tokens")
    return [*RAMPED, *data, f"run_dir={place}/{run}"]


def train_on_two_hosts(runs: Sequence[Sequence[str]]) -> None:
    """Trains runs one after the other on the same two hosts of four devices each."""

    def train_each(pod: Pod) -> None:
        with together(report, 30, 300, lambda: None):
            for keys in runs:
                train(load_config(overrides=keys))

    run(train_each, devices=8, hosts=2, timeout=600)


def stated(run_dir: AnyPath, place: str) -> str:
    """The config of a run, without its place."""
    text = (run_dir / "config.yml").read_text().replace(place, "PLACE")
    return re.sub(r"PLACE/(here|hosts)\b", "PLACE/run", text)


def items(run_dir: AnyPath) -> dict[int, set[str]]:
    """The items of each checkpoint."""
    return {
        step: {p.name for p in (run_dir / "checkpoints" / str(step)).iterdir()} for step in STEPS
    }


@pytest.mark.slow
def test_a_ramped_run_on_disk_gs_and_s3_on_one_process_and_on_two_hosts_is_the_same_run(
    gs: Store, s3: Store, tmp_path: Path
) -> None:
    for store in (gs, s3):
        store.plan()
    lines = [f'{{"text": "{number} {"word " * (number % 53)}"}}' for number in range(600)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    words = ["dataset_type=jsonl", f"dataset_path={tmp_path}/words.jsonl"]
    assert main(["prepare", *words, "--output", f"{tmp_path}/tokens"]) == 0
    disk = str(tmp_path)
    expected = as_path(f"{disk}/here")
    places = (disk, gs.bucket(), s3.bucket())
    for place in places[1:]:
        copy_tree(tmp_path / "tokens", as_path(f"{place}/tokens"))
    train_on_two_hosts([keys_of(place, "hosts") for place in places])
    for place in places:
        train(tiny_config(*keys_of(place, "here")))
        for run_dir in (as_path(f"{place}/here"), as_path(f"{place}/hosts")):
            assert_same_run(records(run_dir), records(expected))
            assert stated(run_dir, place) == stated(expected, disk)
            assert committed_steps(run_dir) == STEPS
            assert names(run_dir) == names(expected)
            assert items(run_dir) == items(expected) and items(run_dir)[STEPS[0]] >= ITEMS
