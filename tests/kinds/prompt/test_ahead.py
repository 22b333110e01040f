"""Sampling ahead of training: which policy samples a batch is a function of the batch's number
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maxbatch.run.folder.position import read_record
from tests.helpers.policies import GROUP, train
from tests.helpers.tiny import assert_same_run

pytestmark = pytest.mark.runs

SAME = ("step", "samples_seen", "global_batch_size", "data_fingerprint")
CLOSE = ("loss", "grad_norm", "reward", "entropy", "response_length", "old_policy_kl")
AHEAD = (
    "off_policy_steps=1",
    "steps=4",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
)
APART = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")


def assert_same_updates(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert_same_run(found, expected, SAME, CLOSE)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One device, no chunks, in order."""
    return train(tmp_path_factory.mktemp("ahead") / "run", *AHEAD)


def test_a_batch_is_sampled_by_the_policy_before_the_last_batch(
    ahead: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second, *_ = ahead
    assert first["old_policy_kl"] < 1e-9 < second["old_policy_kl"], (
        "the ratio is to the policy that sampled"
    )
    at_once = train(
        tmp_path / "run", *AHEAD, "off_policy_steps=0", "learning_rate=1e-30", "steps=2"
    )
    fingerprints = [line["data_fingerprint"] for line in at_once]
    assert fingerprints == [line["data_fingerprint"] for line in ahead[:2]], (
        "both by the first policy"
    )


def test_two_meshes_side_by_side_sample_the_same_ahead(
    ahead: list[dict[str, Any]], tmp_path: Path
) -> None:
    keys = (*APART, "train_micro_batch_size=4", "rollout_micro_batch_size=2")
    assert_same_updates(train(tmp_path / "run", *AHEAD, *keys, devices=4), ahead)


def test_a_run_that_ended_by_its_own_steps_goes_on_elsewhere_as_if_it_had_not(
    ahead: list[dict[str, Any]], tmp_path: Path
) -> None:
    train(tmp_path / "run", *AHEAD, "steps=1")
    assert read_record(tmp_path / "run/checkpoints/1").ahead, (
        "holds the responses of the next batch"
    )
    train(tmp_path / "run", *AHEAD, *APART, "steps=3", f"micro_batch_size={2 * GROUP}", devices=4)
    assert_same_updates(train(tmp_path / "run", *AHEAD, f"micro_batch_size={GROUP}"), ahead)


@pytest.mark.parametrize(
    ("group", "other"),
    [(4, "num_generations=2"), (2, "filter_groups=true"), (4, "skip_samples=9:11")],
)
def test_saved_responses_of_other_groups_or_prompts_are_sampled_anew(
    tmp_path: Path, group: int, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", *AHEAD, f"num_generations={group}", "steps=1")
    assert "sampled again" not in capsys.readouterr().err
    *_, resumed = train(tmp_path / "run", *AHEAD, f"num_generations={group}", other, "steps=2")
    assert "sampled again" in capsys.readouterr().err
    assert resumed.get("groups_missing", 0) == 0, (
        "other prompts took the places of groups without signal"
    )


def test_filtered_mini_batches_two_batches_ahead_resume_exactly(tmp_path: Path) -> None:
    keys = (
        *AHEAD,
        "off_policy_steps=2",
        "filter_groups=true",
        "num_generations=2",
        "num_minibatches=2",
    )
    whole = train(tmp_path / "whole", *keys, "steps=8")
    train(tmp_path / "parts", *keys, "steps=4", "micro_batch_size=4")
    parts = train(tmp_path / "parts", *keys, *APART, "steps=8", devices=2)
    assert_same_updates(parts, whole)
    assert whole[-1]["samples_seen"] >= 4 * 8


def test_saved_responses_that_do_not_match_their_checksum_are_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", *AHEAD, "steps=1")
    checkpoint = tmp_path / "run/checkpoints/1"
    saved = checkpoint / "ahead/batches"
    saved.write_bytes(saved.read_bytes()[:-1])
    train(tmp_path / "run", *AHEAD, "steps=1")
    assert "does not match its checksum" in capsys.readouterr().err
