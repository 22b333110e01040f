"""Runs that skip spikes: the same updates on every layout, and over a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch.run.folder.position import read_record
from maxbatch.run.pretraining import train
from tests.helpers.tiny import MEASURED, SAME, assert_same_run, one_layer_config, read_metrics

pytestmark = pytest.mark.runs

# At this rate figures differ by their samples alone, and every third update or so is a spike.
RUN = (
    "global_batch_size=8",
    "packing=false",
    "learning_rate=1e-9",
    "skip_step_on_spikes=true",
    "skip_step_interval=6",
    "skip_step_scaling_factor=0.5",
    MEASURED,
)
REASONS = ("skipped", "skip_reason", "skipped_updates")


def run(run_dir: Path, num_devices: int, *overrides: str) -> list[dict[str, Any]]:
    train(one_layer_config(*RUN, f"run_dir={run_dir}", *overrides), jax.devices()[:num_devices])
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("whole")
    return run(run_dir, 1, "steps=24", "per_device_batch_size=8")


def test_a_resume_onto_another_layout_skips_the_same_spikes(
    whole: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four devices that accumulate, then one; the window is in the checkpoint's position."""
    run(tmp_path, 4, "steps=11", "per_device_batch_size=1", "ici_data_parallelism=2")
    spikes = read_record(tmp_path / "checkpoints/11").position.spikes
    assert len(spikes.losses) == len(spikes.grad_norms) == 6
    assert list(spikes.losses) == [line["loss"] for line in read_metrics(tmp_path)[-6:]]
    resumed = run(tmp_path, 1, "steps=24", "per_device_batch_size=8")
    assert_same_run(resumed, whole, (*SAME, *REASONS))
    skipped = [line["step"] for line in whole if line["skipped"]]
    assert 4 <= len(skipped) <= 16 and skipped[0] > 3 and skipped[-1] > 13
    assert list(read_record(tmp_path / "checkpoints/24").position.spikes.steps) == skipped[-3:]
    assert all(line["skip_reason"] == ("spike" if line["skipped"] else None) for line in whole)
    assert "skipped: a spike of the loss or the gradient norm" in capsys.readouterr().out


def test_a_resume_switches_the_rule_and_opt_state_has_one_structure(
    whole: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = ("per_device_batch_size=8",)
    run(tmp_path, 1, "steps=5", "skip_step_on_spikes=false", *cut)
    index = tmp_path / "checkpoints/5/opt_state/index.json"
    without, position = json.loads(index.read_text()), read_record(index.parents[1]).position
    assert not any(position.spikes)
    lines = run(tmp_path, 1, "steps=9", *cut)
    assert "changes the updates that are skipped as spikes" in capsys.readouterr().out
    assert len(read_record(tmp_path / "checkpoints/9").position.spikes.losses) == 4
    assert not any(line["skipped"] for line in lines[:8]), "three figures are kept first"
    index = tmp_path / "checkpoints/9/opt_state/index.json"
    assert json.loads(index.read_text()).keys() == without.keys()
    run(tmp_path, 1, "steps=10", "skip_step_on_spikes=false", *cut)
    assert read_record(tmp_path / "checkpoints/10").position.spikes.losses == ()
