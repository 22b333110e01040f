"""The sample that pulls an update the most is the planted one; a killed replay changes nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import jax
import pytest

from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replayed import ShownSample, Wanted, replay
from maxbatch.around.replay.stream_task import Documents
from maxbatch.run.pretraining import train
from tests.around.replay.test_replay import content
from tests.helpers.command import start
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.tiny import one_layer_config

FEW = ("global_batch_size=4", "checkpoint_period=1", "steps=2")


@pytest.mark.runs
def test_the_samples_that_pull_the_most_are_the_planted_documents(
    tmp_path: Path,
) -> None:
    chance = random.Random(1)
    planted = ["".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(10)) for _ in range(5)]
    good = write_jsonl(
        tmp_path / "good.jsonl", [{"text": text} for text in some_texts(91, longest=24)]
    )
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": text} for text in planted])
    config = one_layer_config(
        "dataset_type=jsonl",
        f"dataset_path={good};{bad}",
        f"data_cache_dir={tmp_path}/cache",
        "packing=false",
        "num_epochs=2",
        "global_batch_size=16",
        "learning_rate_schedule=constant",
        "checkpoint_period=6",
        "max_num_checkpoints_to_keep=null",
        f"run_dir={tmp_path}/run",
    )
    train(config, jax.devices()[:1])
    run = RecordedRun(f"{tmp_path}/run")
    found = replay(run, 6, Wanted(12, around=5), jax.devices()[:2])  # the second epoch
    assert found.differences == [] and len(found.shown) == 6
    named = set[int | None]()
    for update in found.shown:
        by_pull = sorted(update.samples, key=lambda shown: -shown.sample.pull)
        planted_rows = [shown for shown in by_pull if _place(shown)[0] == str(bad)]
        assert by_pull[: len(planted_rows)] == planted_rows
        named |= {_place(shown)[1] for shown in planted_rows}
    assert named == {1, 2, 3, 4, 5}


def _place(shown: ShownSample) -> tuple[str | None, int | None]:
    assert isinstance(shown.content, Documents)
    (document,) = shown.content.documents
    return document.file, document.record


@pytest.mark.processes
@pytest.mark.slow
def test_a_replay_that_is_killed_while_it_takes_updates_changes_no_byte_of_its_run(
    tmp_path: Path,
) -> None:
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    train(one_layer_config(*FEW, f"run_dir={run}"), jax.devices()[:1])
    before = content(run)
    process = start("replay", run, "--step", "2", TMPDIR=str(temporary))
    while not any(temporary.iterdir()) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    assert process.poll() is None, "it is under way"
    process.kill()
    process.communicate()
    assert content(run) == before
