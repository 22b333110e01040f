"""Outcomes: a diverging run leaves one on disk, and a restarted run has none."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError
from maxbatch.run.folder.outcome import RecordedOutcome, Status, read_outcome, write_outcome
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.pretraining import train
from maxbatch.system.errors import DivergedError, TrainingError
from tests.helpers.tiny import tiny_config


def test_a_run_that_diverges_says_so_in_its_folder(tmp_path: Path) -> None:
    keys = (
        "learning_rate=1e30",
        "max_consecutive_skips=2",
        "steps=9",
        "enable_checkpointing=false",
    )
    with pytest.raises(DivergedError):
        train(tiny_config(*keys, f"run_dir={tmp_path / 'run'}"), jax.devices()[:1])
    outcome = read_outcome(tmp_path / "run")
    assert (
        outcome is not None and outcome.status == Status.DIVERGED and "not finite" in outcome.reason
    )


def test_a_look_at_a_finished_run_keeps_its_outcome_and_a_further_update_ends_it(
    tmp_path: Path,
) -> None:
    def start(steps: int) -> None:
        train(tiny_config(f"steps={steps}", f"run_dir={tmp_path / 'run'}"), jax.devices()[:1])

    start(steps=1)
    done = RecordedOutcome(Status.DONE)
    write_outcome(tmp_path / "run", done)
    start(steps=1)
    assert read_outcome(tmp_path / "run") == done
    with pytest.raises(ConfigError):
        train(
            tiny_config("steps=2", "data_shuffle_seed=9", f"run_dir={tmp_path / 'run'}"),
            jax.devices()[:1],
        )
    assert read_outcome(tmp_path / "run") == done, "a refused start changes nothing"
    start(steps=2)
    assert read_outcome(tmp_path / "run") is None


def test_only_divergence_is_recorded_by_the_run_itself(tmp_path: Path) -> None:
    with pytest.raises(TrainingError), RunFolder(str(tmp_path)):
        raise TrainingError("the disk is full")
    assert read_outcome(tmp_path) is None
    with pytest.raises(DivergedError), RunFolder(str(tmp_path)):
        raise DivergedError("9 updates in a row")
    assert read_outcome(tmp_path) == (Status.DIVERGED, "9 updates in a row")
