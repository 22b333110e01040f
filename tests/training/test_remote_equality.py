"""One run, wherever it lies and on however many hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.runs.position import committed_steps
from maxbatch.system.storage import AnyPath, as_path, copy_tree
from maxbatch.training.pretraining import train
from tests.helpers.command import maxbatch
from tests.helpers.stores import Store
from tests.helpers.tiny import TINY_MODEL, tiny_config
from tests.training.test_remote_runs import RAMPED, assert_same, names, records

STEPS = [6, 3]  # of the checkpoints, the newest first
ITEMS = {"params", "opt_state", "position"}


def keys_of(place: str, run: str) -> list[str]:
    """A ramp over prepared tokens; tokens and run lie in the same place."""
    data = (*TINY_MODEL, "dataset_type=tokens", f"dataset_path={place}/tokens")
    return [*RAMPED, *data, f"run_dir={place}/{run}"]


def stated(run_dir: AnyPath, place: str) -> str:
    """What the config of a run says, without the place that it lies in."""
    text = (run_dir / "config.yml").read_text().replace(place, "PLACE")
    return re.sub(r"PLACE/(here|hosts)\b", "PLACE/run", text)


def items(run_dir: AnyPath) -> dict[int, set[str]]:
    """The items of each checkpoint."""
    return {step: {p.name for p in (run_dir / "checkpoints" / str(step)).iterdir()} for step in STEPS}


@pytest.mark.slow
def test_a_ramped_run_on_disk_gs_and_s3_on_one_process_and_on_four_hosts_is_the_same_run(
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
    for place in (disk, gs.bucket(), s3.bucket()):
        if place != disk:
            copy_tree(tmp_path / "tokens", as_path(f"{place}/tokens"))
        train(tiny_config(*keys_of(place, "here")))
        hosts = maxbatch("train", *keys_of(place, "hosts"), "--simulate-devices", "8", "--simulate-hosts", "4")
        assert hosts.returncode == 0, hosts.stderr
        for run_dir in (as_path(f"{place}/here"), as_path(f"{place}/hosts")):
            assert_same(records(run_dir), records(expected))
            assert stated(run_dir, place) == stated(expected, disk)
            assert committed_steps(run_dir) == STEPS
            assert names(run_dir) == names(expected)
            assert items(run_dir) == items(expected) and items(run_dir)[STEPS[0]] >= ITEMS
