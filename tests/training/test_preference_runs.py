"""Runs on preference pairs: a sample is a pair, and all that holds of samples holds of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.system.errors import ConfigError
from maxbatch.training.own import Parts
from maxbatch.training.pretraining import train
from maxbatch.training.record.recorder import Record
from maxbatch.training.reference import REFERENCE_FILE, Reference
from tests.helpers.chats import write_jsonl

LENGTH = 16
WORDS = ("red", "blue", "green", "gray", "pink", "black", "white")
PAIRS = [
    {"prompt": f"{word} {number}?", "chosen": " yes" * (1 + number % 2), "rejected": " no" * (1 + number % 3)}
    for number, word in enumerate(WORDS * 3)
]
SETTINGS = (
    "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=32",
    "base_num_decoder_layers=1", "vocab_size=259", f"max_target_length={LENGTH}", "use_dpo=true", "dataset_type=jsonl",
    "global_batch_size=6", "learning_rate_schedule=constant", "warmup_steps_fraction=0", "learning_rate=1e-2",
    "generate_prompt=", "log_to=", "compilation_cache_dir=none",
)  # fmt: skip

Run = Callable[..., list[Record]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that trains in a folder on some devices, and returns the records of all updates."""
    folder = tmp_path_factory.mktemp("pairs")
    write_jsonl(folder / "pairs.jsonl", PAIRS)

    def trained(name: str, num_devices: int, *overrides: str) -> list[Record]:
        paths = (f"dataset_path={folder}/pairs.jsonl", f"run_dir={folder}/{name}", f"data_cache_dir={folder}/cache")
        config = load_config(overrides=[*SETTINGS, *paths, *overrides])
        return train(config, jax.devices()[:num_devices]).history

    return trained


@pytest.fixture(scope="module")
def whole(run: Run) -> list[Record]:
    return run("whole", 1, "steps=100", "eval_interval=50", "eval_fraction=0.1")


def test_the_chosen_answers_margin_goes_from_0_to_over_5_in_100_updates(whole: list[Record]) -> None:
    assert abs(whole[0]["margin"]) < 1e-5 and whole[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert whole[-1]["margin"] > 5 and whole[-1]["pair_accuracy"] == 1
    assert whole[0]["loss_weight"] == 6 and whole[1]["tokens_seen"] == 2 * 6 * 2 * LENGTH
    assert whole[-1]["eval_loss"] < 0.1


@pytest.mark.slow
def test_pairs_train_the_same_in_any_cut_and_after_a_resume_elsewhere(run: Run, whole: list[Record]) -> None:
    run("cut", 2, "steps=3", "gradient_accumulation_steps=3", "eval_interval=-1", "eval_fraction=0.1")
    # 4 rows a pass on 4 devices: the last pass of 6 pairs has 2 rows of padding.
    resumed = run(
        "cut", 4, "steps=5", "per_device_batch_size=1", "batch_padding=true", "eval_interval=-1", "eval_fraction=0.1"
    )
    for ours, theirs in zip(resumed, whole, strict=False):
        assert ours["data_fingerprint"] == theirs["data_fingerprint"]
        for name in ("loss", "margin"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), (ours["step"], name)
    assert [record["step"] for record in resumed] == [1, 2, 3, 4, 5]


def test_pairs_are_refused_where_they_cannot_be_trained_on() -> None:
    config = load_config(overrides=[*SETTINGS, "dataset_path=pairs.jsonl", "steps=1"])
    with pytest.raises(ConfigError, match="works: use_dpo=false"):
        train(config, parts=Parts(objective=lambda model, rows: (0.0, 0.0)))
    for override, words in (
        ("use_sft=true", "use_sft=true: must be false beside use_dpo=true"),
        ("batch_size=4", "use_dpo=true: must be false beside batch_size"),
        ("dpo_algo=orpo dpo_label_smoothing=0.1", "dpo_label_smoothing=0.1: must be 0 beside dpo_algo=orpo"),
        ("dpo_label_smoothing=0.5", "dpo_label_smoothing=0.5: must be less than 0.5"),
    ):
        settings = [one for one in SETTINGS if "global_batch" not in one]
        with pytest.raises(ConfigError, match=words):
            load_config(overrides=[*settings, *override.split()])


def test_a_reference_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    known = Reference(7, 2)
    known.add(np.array([9, 1, 5], np.uint64), np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    known.add(np.array([5, 2], np.uint64), np.array([[7, 8], [9, 10]], np.float32))
    path = tmp_path / REFERENCE_FILE
    path.write_bytes(known.to_bytes())
    found = Reference.read(path)
    assert found is not None and (found.num_samples, found.num_held_out) == (7, 2)
    assert found.hashes_K.tolist() == [1, 2, 5, 9]
    assert found.logprobs_Kx2.tolist() == [[3, 4], [9, 10], [5, 6], [1, 2]]
    damaged = bytearray(known.to_bytes())
    damaged[-3] ^= 1
    for content in (bytes(damaged), known.to_bytes()[:-1], b"", json.dumps({"pairs": 0}).encode()):
        path.write_bytes(content)
        assert Reference.read(path) is None
    assert Reference.read(tmp_path / "missing") is None
