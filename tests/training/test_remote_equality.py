"""One run, wherever it lies and on however many hosts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.runs.position import committed_steps
from maxbatch.system.ports import free_port
from maxbatch.system.storage import AnyPath, as_path, copy_tree
from maxbatch.training.pretraining import train
from tests.helpers.command import environment
from tests.helpers.stores import Store
from tests.helpers.tiny import assert_same_run, tiny_config
from tests.training.test_remote_runs import RAMPED, names, records

STEPS = [6, 3]  # of the checkpoints, the newest first
ITEMS = {"params", "opt_state", "position"}


def keys_of(place: str, run: str) -> list[str]:
    """A ramp over prepared tokens; tokens and run lie in the same place."""
    data = ("dataset_type=tokens", f"dataset_path={place}/tokens")
    return [*RAMPED, *data, f"run_dir={place}/{run}"]


# What `maxbatch train` does, again and again: to start costs a host more than to train such runs.
TRAIN_EACH = """
import json, sys
from maxbatch.commands.simulation import simulate_devices
simulate_devices(2)
from maxbatch.config.loading import load_config
from maxbatch.parallel.hosts import together
from maxbatch.system.errors import report
from maxbatch.training.pretraining import train
with together(report, 30, lambda: None):
    for keys in json.loads(sys.argv[1]):
        train(load_config(overrides=keys))
"""


def train_on_four_hosts(runs: Sequence[Sequence[str]]) -> None:
    """Trains runs one after the other on the same four hosts of two devices each."""
    names = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "4"}
    names["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    with contextlib.ExitStack() as stack:
        hosts = []
        for index in range(4):
            variables = environment() | names | {"JAX_PROCESS_ID": str(index)}
            command = [sys.executable, "-c", TRAIN_EACH, json.dumps(runs)]
            host = subprocess.Popen(
                command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            hosts.append(stack.enter_context(host))
            stack.callback(host.kill)
        errors = [host.communicate(timeout=600)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0] * 4, errors[0]


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
    places = (disk, gs.bucket(), s3.bucket())
    for place in places[1:]:
        copy_tree(tmp_path / "tokens", as_path(f"{place}/tokens"))
    train_on_four_hosts([keys_of(place, "hosts") for place in places])
    for place in places:
        train(tiny_config(*keys_of(place, "here")))
        for run_dir in (as_path(f"{place}/here"), as_path(f"{place}/hosts")):
            assert_same_run(records(run_dir), records(expected))
            assert stated(run_dir, place) == stated(expected, disk)
            assert committed_steps(run_dir) == STEPS
            assert names(run_dir) == names(expected)
            assert items(run_dir) == items(expected) and items(run_dir)[STEPS[0]] >= ITEMS
