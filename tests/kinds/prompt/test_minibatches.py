"""Mini-batches and filtered groups: a batch is a function of the stream, not of chunks or
resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maxbatch.run.folder.position import read_record
from tests.helpers.policies import GROUP, policy_config, responses_soon_ended, train
from tests.helpers.tiny import assert_same_run

pytestmark = pytest.mark.runs

SAME = ("step", "samples_seen", "global_batch_size", "data_fingerprint", "skip_reason")
CLOSE = ("loss", "grad_norm", "reward", "entropy", "response_length")


def assert_same_updates(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    trained = [line for line in expected if line["loss"] is not None]
    assert_same_run([line for line in found if line["loss"] is not None], trained, SAME, CLOSE)
    assert [line["samples_seen"] for line in found] == [line["samples_seen"] for line in expected]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three batches of 8 prompts, in four mini-batches each; the last batch has three prompts."""
    folder = tmp_path_factory.mktemp("cut")
    return train(folder / "run", "num_minibatches=4", "steps=null", "train_samples=19")


def test_a_batch_is_cut_in_stream_order_on_any_devices_and_a_part_without_a_group_changes_nothing(
    cut: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert [line["samples_seen"] for line in cut] == [0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 19]
    assert [line["global_batch_size"] // GROUP for line in cut] == [
        2,
        2,
        2,
        2,
        2,
        2,
        2,
        2,
        2,
        1,
        0,
        0,
    ]
    assert [line["loss"] is None for line in cut] == [False] * 10 + [True] * 2
    assert not any(line["skipped"] for line in cut)
    (whole,) = train(tmp_path / "whole", "steps=1")
    parts = sum(int(line["data_fingerprint"], 16) for line in cut[:4]) % 2**64
    assert parts == int(whole["data_fingerprint"], 16), (
        "all parts were sampled before the first update"
    )
    again = train(
        tmp_path / "chunks",
        "num_minibatches=4",
        "steps=null",
        "train_samples=19",
        "batch_padding=true",
        "micro_batch_size=6",
        "rollout_micro_batch_size=4",
        devices=3,
    )
    assert again[0]["micro_batch_size"] == 6 and again[0]["num_micro_batches"] == 2, (
        "8 pairs and 4 slots of padding"
    )
    assert_same_updates(again, cut)


def test_responses_that_share_rows_and_passes_train_the_same_updates(tmp_path: Path) -> None:
    keys = ("num_minibatches=2", "loss_algo=gspo-token", "loss_agg_mode=sequence-mean", "steps=4")
    with responses_soon_ended():
        expected = train(tmp_path / "rows", *keys)
        packed = train(tmp_path / "passes", *keys, "max_tokens_per_pass=24", devices=2)
    assert_same_updates(packed, expected)
    for line in packed:
        assert line["slot_share"] <= line["row_share"] <= 1
        assert line["num_passes"] == line["num_micro_batches"] < 8, "those of a row a pair"


FILTERED = (
    "filter_groups=true",
    "num_generations=2",
    "num_minibatches=2",
    "max_prompts_per_batch=12",
    "batch_size=8",
    "learning_rate_schedule=constant",
    "skip_step_on_spikes=true",
    "skip_step_interval=4",
    "skip_step_scaling_factor=0.5",
)


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("filtered") / "run", *FILTERED, "steps=6")


def test_filtered_groups_are_replaced_by_the_next_prompts_and_every_prompt_that_was_read_counts(
    filtered: list[dict[str, Any]], tmp_path: Path
) -> None:
    ends = [line["samples_seen"] for line in filtered[1::2]]
    read = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert all(8 <= count <= 12 for count in read) and max(read) > 8
    for count, first, last in zip(read, filtered[::2], filtered[1::2], strict=True):
        kept = (first["global_batch_size"] + last["global_batch_size"]) // 2
        assert first["groups_missing"] == 8 - kept and (kept == 8 or count == 12)
        assert kept / count <= 1 - first["groups_without_signal"] + 1e-9
    assert "spike" in [line["skip_reason"] for line in filtered]
    chunked = train(tmp_path / "chunked", *FILTERED, "steps=6", "micro_batch_size=4", devices=2)
    assert_same_updates(chunked, filtered)


def test_a_resume_between_filtered_batches_reads_on_where_the_last_one_ended(
    filtered: list[dict[str, Any]], tmp_path: Path
) -> None:
    *_, last = train(tmp_path / "run", *FILTERED, "steps=4")
    position = read_record(tmp_path / "run/checkpoints/4").position
    assert (position.place.planned, position.place.seen) == (16, last["samples_seen"]) != (16, 16)
    assert_same_updates(train(tmp_path / "run", *FILTERED, "steps=6"), filtered)


def test_a_constant_reward_is_named_where_no_group_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.py").write_text("def same(prompt, response, record):\n    return 1.0\n")
    keys = (*FILTERED, f"reward={tmp_path}/same.py:same", "steps=2")
    from maxbatch.kinds.prompt.run import train_policy
    from maxbatch.system.errors import TrainingError

    constant = r"none of its 2 updates changed the parameters: the reward is constant, 1 for every response; look at re"
    with pytest.raises(TrainingError, match=constant):
        train_policy(policy_config(tmp_path / "run", *keys))
    said = capsys.readouterr().err
    assert (
        "trains on 0 groups: the reward is constant, 1 for all 24 responses to "
        "max_prompts_per_batch=12 pr" in said
    )
