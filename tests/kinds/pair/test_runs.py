"""Runs on preference pairs: a sample is a pair, and all that holds of samples holds of pairs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.kinds.pair.reference import REFERENCE_FILE, KnownAnswers
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from maxbatch.run.record.recorder import Record
from maxbatch.system.errors import ConfigError, TrainingError
from tests.helpers.chats import chat_config, write_jsonl

pytestmark = pytest.mark.runs

LENGTH = 16
WORDS = ("red", "blue", "green", "gray", "pink", "black", "white")
PAIRS = [
    {
        "prompt": f"{word} {number}?",
        "chosen": " yes" * (1 + number % 2),
        "rejected": " no" * (1 + number % 3),
    }
    for number, word in enumerate(WORDS * 3)
]
SETTINGS = (
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=32",
    "base_num_decoder_layers=1",
    "vocab_size=259",
    f"max_target_length={LENGTH}",
    "use_dpo=true",
    "dataset_type=jsonl",
    "global_batch_size=6",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "learning_rate=1e-2",
    "generate_prompt=",
    "log_to=",
    "gradient_noise_scale=false",
)

QUICK = ("eval_interval=-1", "eval_fraction=0", "checkpoint_period=1000")

Run = Callable[..., list[Record]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """A function that trains in a folder on some devices, and returns the records of all
    updates.
    """
    write_jsonl(folder / "pairs.jsonl", PAIRS)

    def trained(name: str, num_devices: int, *overrides: str) -> list[Record]:
        paths = (
            f"dataset_path={folder}/pairs.jsonl",
            f"run_dir={folder}/{name}",
            f"data_cache_dir={folder}/cache",
        )
        config = load_config(overrides=[*SETTINGS, *paths, *overrides])
        return train(config, jax.devices()[:num_devices]).history

    return trained


@pytest.fixture(scope="module")
def whole(run: Run) -> list[Record]:
    return run("whole", 1, "steps=100", "eval_interval=50", "eval_fraction=0.1")


def test_the_chosen_answers_margin_goes_from_0_to_over_5_in_100_updates(
    whole: list[Record],
) -> None:
    assert abs(whole[0]["margin"]) < 1e-5 and whole[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert whole[-1]["margin"] > 5 and whole[-1]["pair_accuracy"] == 1
    assert whole[0]["loss_weight"] == 6 and whole[1]["tokens_seen"] == 2 * 6 * 2 * LENGTH
    assert whole[-1]["eval_loss"] < 0.1


def test_pairs_train_the_same_in_any_cut_and_after_a_resume_elsewhere(
    run: Run, whole: list[Record]
) -> None:
    run(
        "cut",
        2,
        "steps=3",
        "gradient_accumulation_steps=3",
        "eval_interval=-1",
        "eval_fraction=0.1",
    )
    # 4 rows a pass on 4 devices: the last pass of 6 pairs has 2 rows of padding.
    resumed = run(
        "cut",
        4,
        "steps=5",
        "per_device_batch_size=1",
        "batch_padding=true",
        "ici_context_parallelism=2",
        "context_parallel_strategy=ring",
        "eval_interval=-1",
        "eval_fraction=0.1",
    )
    for ours, theirs in zip(resumed, whole, strict=False):
        assert ours["data_fingerprint"] == theirs["data_fingerprint"]
        for name in ("loss", "margin"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), (
                ours["step"],
                name,
            )
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-4)
    assert [record["step"] for record in resumed] == [1, 2, 3, 4, 5]


# tokens of a pass and keys, by devices; the passes of the last two have the same rows
SHARING = {
    1: (2 * LENGTH, ()),
    4: (LENGTH, ("ici_data_parallelism=2",)),
    2: (2 * LENGTH, ("ici_context_parallelism=2", "context_parallel_strategy=ulysses")),
}


@pytest.fixture(scope="module")
def sharing(run: Run) -> Callable[[int], list[Record]]:
    """Returns the records of a run whose answers share rows, by its devices."""

    def shared(devices: int) -> list[Record]:
        budget, keys = SHARING[devices]
        return run(
            f"passes-{devices}",
            devices,
            f"max_tokens_per_pass={budget}",
            "steps=4",
            "eval_interval=-1",
            "eval_fraction=0.1",
            "checkpoint_period=1000",
            "gradient_noise_scale=true",
            *keys,
        )

    return functools.cache(shared)


def test_pairs_whose_answers_lie_on_several_shards_have_the_noise_scale_of_one(
    sharing: Callable[[int], list[Record]],
) -> None:
    one, several = ([line["gradient_noise_scale"] for line in sharing(n)] for n in (2, 4))
    assert any(one) and several == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("devices", SHARING)
def test_answers_that_share_rows_and_passes_train_the_same_pairs(
    sharing: Callable[[int], list[Record]], whole: list[Record], devices: int
) -> None:
    shared = sharing(devices)
    for ours, theirs in zip(shared, whole, strict=False):
        assert ours["data_fingerprint"] == theirs["data_fingerprint"]
        for name, tolerance in (("loss", 2e-4), ("margin", 2e-4), ("grad_norm", 3e-4)):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-5), name
        assert ours["loss_weight"] == 6
        # first margins are 0, but for rounding
        assert ours["step"] == 1 or ours["pair_accuracy"] == theirs["pair_accuracy"]
        assert ours["slot_share"] <= ours["row_share"] <= 1


def test_pairs_that_one_epoch_leaves_out_have_their_reference_in_the_next(
    run: Run, folder: Path
) -> None:
    """And a resume may leave out others."""
    first = run("holes", 1, "steps=2", "skip_samples=3:6 16:20", *QUICK)
    lines = run("holes", 1, "steps=5", "skip_samples=3:6 16:17", *QUICK)
    assert lines[:2] == first and [line["stream_position"] for line in lines] == [9, 15, 22, 28, 34]
    known = KnownAnswers.read(folder / "holes" / REFERENCE_FILE, "pair", 2)
    assert known is not None and len(known.hashes_K) == len(PAIRS)


def test_held_out_pairs_that_a_resume_brings_are_compared_with_their_own_reference(
    run: Run, tmp_path: Path
) -> None:
    others = [one | {"prompt": f"{one['prompt']} then?"} for one in PAIRS]
    evals = (*QUICK, "eval_interval=1", "learning_rate=0.1")
    first, second = (f"eval_dataset_path={tmp_path}/{name}.jsonl" for name in ("first", "second"))
    write_jsonl(tmp_path / "first.jsonl", PAIRS[:6])
    write_jsonl(tmp_path / "second.jsonl", others[:6])
    run("moved", 1, "steps=1", *evals, first)
    moved = run("moved", 1, "steps=2", *evals, second)
    fresh = run("fresh", 1, "steps=2", *evals, second)
    assert moved[-1]["loss"] == pytest.approx(fresh[-1]["loss"], rel=1e-5)
    assert moved[-1]["eval_loss"] == pytest.approx(fresh[-1]["eval_loss"], rel=1e-4)


def test_a_pair_that_the_reference_lacks_is_an_error() -> None:
    tokens, ones = np.array([[1, 2, 3, 4]], np.int32), np.ones((1, 4))
    rows = {"tokens": tokens, "segments": ones.astype(np.int32), "weights": ones.astype(np.float32)}
    known = KnownAnswers("pair", 2)
    known.add(np.array([1, 2**64 - 1], np.uint64), np.ones((2, 2), np.float32))
    for reference in (known, KnownAnswers("pair", 2)):
        with pytest.raises(TrainingError, match="1 of 1 pairs are not in the reference"):
            reference.beside(rows)


def test_the_reference_of_a_resume_is_the_checkpoint_that_the_run_started_from(
    run: Run, folder: Path
) -> None:
    """The base trains on, and the reference's file is lost, or another run's."""
    run("base", 1, "steps=1", *QUICK)
    start = (f"load_parameters_path={folder}/base", *QUICK)
    expected = run("expected", 1, "steps=2", *start)
    run("resumed", 1, "steps=1", *start)
    run("base", 1, "steps=30", *QUICK)
    run("later", 1, "steps=1", *start)
    for file in (None, folder / "later" / REFERENCE_FILE):
        shutil.rmtree(folder / "again", ignore_errors=True)
        shutil.copytree(folder / "resumed", folder / "again")
        (folder / "again" / REFERENCE_FILE).unlink()
        if file:
            shutil.copy(file, folder / "again")
        again = run("again", 1, "steps=2", *start)
        assert again[1]["margin"] == pytest.approx(expected[1]["margin"], rel=1e-4)


def test_a_resume_that_is_refused_for_its_reference_or_its_held_out_pairs_writes_nothing(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    run("refused", 1, "steps=1", *QUICK)

    def written() -> dict[str, bytes]:
        files = (
            path
            for path in (folder / "refused").rglob("*")
            if path.is_file() and path.name != "run.json"
        )
        return {str(path): path.read_bytes() for path in files}

    before = written()
    with pytest.raises(ConfigError, match="started from init_weights_seed and reads it again"):
        run("refused", 1, "steps=3", *QUICK, f"load_parameters_path={folder}/other")
    assert written() == before
    gone = (*QUICK, "eval_interval=1", f"eval_dataset_path={tmp_path}/none.jsonl")
    for name, refused in (
        ("refused", gone),
        ("refused", (*QUICK, "eval_interval=1", "early_stopping_patience=1")),
    ):
        with pytest.raises(ConfigError, match=r"no such file or folder|nothing is held out"):
            run(name, 1, "steps=3", *refused)
        assert written() == before
    with pytest.raises(ConfigError, match="no such file or folder"):
        run("new", 1, "steps=3", *gone)
    assert not (folder / "new").exists()


def test_the_lines_count_pairs_and_the_closing_sample_is_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "red?"}
    answers = {"chosen": "yes", "rejected": "no"}
    pair = {name: [asked, {"role": "assistant", "content": text}] for name, text in answers.items()}
    form = ("use_sft=false", "dpo_algo=orpo", "steps=1", "global_batch_size=2", *QUICK)
    small = [
        one
        for one in SETTINGS
        if one.startswith(("base_", "head_dim", "use_dpo", "log_to", "compilation_cache"))
    ]
    train(
        chat_config(tmp_path, [pair] * 4, *small, *form, f"run_dir={tmp_path}/run"),
        jax.devices()[:1],
    )
    printed, _, sample = capsys.readouterr().out.partition("--- a sample ---")
    assert ", 4 pairs an epoch | " in printed and "\ndone: step 1, 2 pairs, in " in printed
    assert "\n<|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n" in sample
    assert f"next: maxbatch generate {tmp_path}/run --chat\n" in sample


def test_pairs_are_refused_beside_a_loss_of_the_user() -> None:
    config = load_config(overrides=[*SETTINGS, "dataset_path=pairs.jsonl", "steps=1"])
    with pytest.raises(ConfigError, match="works: use_dpo=false"):
        train(config, parts=Parts(objective=lambda model, rows: (0.0, 0.0)))


def test_a_reference_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    known = KnownAnswers("pair", 2, 7, 2)
    known.add(np.array([9, 1, 5], np.uint64), np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    known.add(np.array([5, 2], np.uint64), np.array([[7, 8], [9, 10]], np.float32))
    path = tmp_path / REFERENCE_FILE
    path.write_bytes(known.to_bytes())
    found = KnownAnswers.read(path, "pair", 2)
    assert found is not None and (found.num_samples, found.num_held_out) == (7, 2)
    assert found.hashes_K.tolist() == [1, 2, 5, 9]
    assert found.logprobs_KxA.tolist() == [[3, 4], [9, 10], [5, 6], [1, 2]]
    damaged = bytearray(known.to_bytes())
    damaged[-3] ^= 1
    for content in (bytes(damaged), known.to_bytes()[:-1], b"", json.dumps({"pairs": 0}).encode()):
        path.write_bytes(content)
        assert KnownAnswers.read(path, "pair", 2) is None
    assert KnownAnswers.read(tmp_path / "missing", "pair", 2) is None


def test_a_reference_has_as_many_figures_as_a_sample_has_answers(tmp_path: Path) -> None:
    known = KnownAnswers("answer", 1)
    known.add(np.array([3, 1], np.uint64), np.array([[1], [2]], np.float32))
    (tmp_path / REFERENCE_FILE).write_bytes(known.to_bytes())
    found = KnownAnswers.read(tmp_path / REFERENCE_FILE, "answer", 1)
    assert found is not None and found.logprobs_KxA.tolist() == [[2], [1]]
    assert KnownAnswers.read(tmp_path / REFERENCE_FILE, "pair", 2) is None
