"""Unknown keys: all at once in one line, other frameworks' words from their table, and hints that
mislead nobody.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.words import FRAMEWORKS, Word, look_up, rows
from maxbatch.cli import main
from maxbatch.config.rules import check_data_paths
from maxbatch.config.sections import KEYS
from maxbatch.config.unknown import misspelt
from maxbatch.config.values import shown_path
from tests.helpers.configs import error_of, write

WORDS = [row for row in rows() if "*" not in row.word]
FOREIGN = [row for row in WORDS if row.word not in KEYS]


def test_the_table_has_at_least_250_words_of_every_framework() -> None:
    assert len({row.word for row in WORDS}) >= 250
    assert {name for row in rows() for name in row.whose} == set(FRAMEWORKS)


def test_every_row_names_keys_that_there_are_and_says_why() -> None:
    for row in rows():
        assert row.why and row.word == row.word.lower(), row
        assert set(row.keys) <= set(KEYS), row
        assert row.is_same + row.is_ignored + (row.here[0] in "~!") == 1, row
    pairs = [(row.word, name) for row in rows() for name in row.whose]
    assert len(pairs) == len(set(pairs))


def answered(row: Word, message: str) -> bool:
    """Whether a message names a word's counterpart, or its lack."""
    if row.keys:
        return all(key in message for key in row.keys)
    return "can be left out" in message if row.is_ignored else "is not supported" in message


def test_every_word_is_answered_from_its_row_alone() -> None:
    for row in FOREIGN:
        message = error_of(overrides=(f"{row.word}=1",))
        asked = look_up(row.word)
        assert asked is not None and answered(asked, message), message
        assert "nearest" not in message and "\n" not in message


def test_three_words_at_once_are_all_answered() -> None:
    for first in range(0, len(FOREIGN) - 2, 3):
        three = FOREIGN[first : first + 3]
        if len({row.word for row in three}) < 3:
            continue
        message = error_of(overrides=tuple(f"{row.word}=1" for row in three))
        assert message.startswith("unknown keys ") and "\n" not in message
        assert all(f"{row.word} (" in message for row in three)


def test_no_hint_by_spelling_names_a_key_of_another_meaning() -> None:
    for row in FOREIGN:
        near = misspelt(row.word)
        # the key may be another framework's word of the same meaning
        same = look_up(near) if near else None
        assert near is None or near in row.keys or (same and same.here == row.here), (
            row.word,
            near,
        )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("stepz", "steps"),
        ("learning_rat", "learning_rate"),
        ("Steps", "steps"),
        ("global-batch-size", "global_batch_size"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("learningrate", "learning_rate"),
        ("min_learning_rate", None),
        ("ici_sequence_parallelism", None),
        ("max_steps", None),
        ("xyzzy", None),
    ],
)
def test_a_hint_by_spelling_needs_every_part_of_the_name(name: str, near: str | None) -> None:
    assert misspelt(name) == near


def test_what_works_names_works() -> None:
    for row in (row for row in FOREIGN if row.is_same and look_up(row.word) is row):
        text = KEYS[row.keys[0]].default
        text = {"null": "3", "": "here"}.get(text, text)
        message = error_of(overrides=(f"{row.word}={text}",))
        _, separator, works = message.partition("; works: ")
        if separator:
            load_config(overrides=shlex.split(works))
    assert error_of(overrides=("max_steps=7",)).endswith("; works: steps=7")
    # Not named: it would not work.
    assert "works" not in error_of(overrides=("max_steps=7", "train_iters=2"))
    assert "works" not in error_of(overrides=("adam_beta1=2",))


@pytest.mark.parametrize(
    ("stated", "works"),
    [
        ("data_path=/d/x", "dataset_path=/d/x dataset_type=text"),
        ("train_file=/d/x.jsonl", "dataset_path=/d/x.jsonl dataset_type=jsonl"),
        ("train_data_path=/d/x", "dataset_path=/d/x dataset_type=megatron"),
        ("eval_file=b.jsonl", None),  # beside python_stdlib, which reads no path
    ],
)
def test_a_path_of_data_comes_with_the_type_that_reads_it(stated: str, works: str | None) -> None:
    said = error_of(overrides=(stated,)).partition("; works: ")[2]
    assert (said or None) == works
    if works:
        check_data_paths(load_config(overrides=works.split()))


def test_the_named_faults_are_answered_with_their_own_meaning() -> None:
    message = error_of(overrides=("max_steps=100", "effective_batch_size=512", "hidden_size=768"))
    assert message.endswith("; works: steps=100 global_batch_size=512 base_emb_dim=768")


def test_unknown_keys_of_file_and_overrides_are_reported_together() -> None:
    run = write(
        Path("run.yml"),
        "max_steps: 3\nmlp_bias: [silu, linear]\nmla_naive_kvcache: {a: b}\nsa_block_q: 512\n",
    )
    message = error_of(run, ("n_layer=2",))
    assert all(
        f"{word} (" in message
        for word in ("max_steps", "mlp_bias", "mla_naive_kvcache.a", "n_layer")
    )
    assert f"maxbatch import maxtext {run}" in message


def test_a_maxtext_file_names_its_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "base_config: base.yml\nmlp_bias: [silu]\nsa_block_q: 512\nper_device_batch_size: 2\n"
    run = write(tmp_path / "run.yml", text)
    for command in ("plan", "train"):
        assert main([command, str(run)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"maxbatch import maxtext {run}" in error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rampup-batch-size 16 16 96", "maps to batch_size_schedule"),
        (
            "--rampup-batch-size 16 16 96 --global-batch-size 64",
            "works: batch_size_schedule='0:16 32:32 64:48 96:64'",
        ),
        ("--micro-batch-size 2", "works: per_device_batch_size=2"),
        ("--train-iters=7", "works: steps=7"),
        ("--batch-size 8", "global_batch_size"),
        ("--steps=4", "config keys are stated without dashes; works: steps=4"),
        ("--steps 4", "config keys are stated without dashes; works: steps=4"),
    ],
)
def test_flags_of_others_are_answered_like_keys(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(["plan", *shlex.split(line)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "works"),
    [
        ("per_replica_batch_size=64 --devices 4", "global_batch_size=256"),
        ("--per-replica-batch-size 64 --devices 4", "global_batch_size=256"),
        (
            "--per-replica-batch-size 64 ici_tensor_parallelism=2 --devices=4",
            "global_batch_size=128",
        ),
        ("batch_size_per_node=256 --devices 8 --hosts 2", "global_batch_size=512"),
        ("--batch-size-per-node 256 --devices 8 --hosts 2", "global_batch_size=512"),
        ("--micro-batch-size 16", "per_device_batch_size=16"),
        ("--micro-batch-size 16 ici_tensor_parallelism=4", "per_device_batch_size=4 --devices 4"),
        ("rl effective_batch_size=64", "batch_size=8"),
        ("rl --effective-batch-size 64", "batch_size=8"),
        ("rl ppo_micro_batch_size_per_gpu=8 --devices 4", "micro_batch_size=32"),
    ],
)
def test_a_hint_counts_devices_and_hosts_for_keys_and_flags(
    capsys: pytest.CaptureFixture[str], line: str, works: str
) -> None:
    assert main(["plan", *shlex.split(line)]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"; works: {works}\n") and error.count("\n") == 1


def test_the_flag_of_a_batch_names_its_three_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--batch-size", "256", "--devices", "8", "--hosts", "2"]) == 2
    error = capsys.readouterr().err
    assert (
        "global_batch_size=256 (of all devices), per_device_batch_size=256 (of each process)"
        in error
    )
    assert "global_batch_size=512 (of each node)" in error


def test_a_file_with_axolotls_batch_names_its_import(tmp_path: Path) -> None:
    run = write(tmp_path / "run.yml", "micro_batch_size: 2\ngradient_accumulation_steps: 4\n")
    with pytest.raises(
        ConfigError, match=re.escape(f"works: maxbatch import axolotl {shown_path(run)}") + "$"
    ):
        load_config(run)


def test_the_keys_of_a_nested_block_are_answered_by_their_names(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run.yml",
        "lora:\n  lora_rank: 8\nrl: {num_generations: 2, off_policy_steps: 0}\n",
    )
    message = error_of(run)
    assert (
        "lora.lora_rank (verl, MaxText) is lora_rank" in message
        and "rl.num_generations (" in message
    )
    assert "rl.off_policy_steps (MaxText) is off_policy_steps" in message
    assert message.endswith(f"maxbatch import maxtext {run}")
    assert error_of(write(tmp_path / "of.yml", "run:\n  log_period: 2\n")).endswith(
        "unknown key run.log_period is log_period: state it without the block; works: log_period=2"
    )


def test_a_batch_of_prompts_is_told_from_the_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "batch_size=32", "--devices", "1", "--json"]) == 0
    assert "counts prompts" in (said := capsys.readouterr().err) and "global_batch_size" in said
    assert main(["plan", "batch_size=32", "gradient_accumulation_steps=2"]) == 2
    assert "in prompts" in (said := capsys.readouterr().err) and "global_batch_size" in said
    assert main(["rl", "enable_rampup_batch_size=true"]) == 2  # its config states batch_size
    assert capsys.readouterr().err.endswith(
        "in prompts; works: enable_rampup_batch_size left out\n"
    )
    assert main(["train", "batch_size=32"]) == 2
    assert "counts prompts" in (said := capsys.readouterr().err) and "global_batch_size" in said
    with pytest.raises(
        ConfigError, match=r"micro_batch_size \(Axolotl, .* maps to per_device_batch_size"
    ):
        load_config(overrides=["micro_batch_size=2"])


@pytest.mark.parametrize(
    ("typed", "works"),
    [
        (
            ["prompt_feature=question", "completion_feature=answer"],
            "{prompt: question, completion: answer}",
        ),
        (["input_key=q", "output_key=completion"], "{prompt: q}"),
        (["field_messages=turns"], "{messages: turns}"),
        (["columns.prompt=q", "columns.response=a"], "{instruction: q, output: a}"),
    ],
)
def test_words_for_fields_are_answered_with_one_record_fields(typed: list[str], works: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            overrides=[*typed, "dataset_type=jsonl", "dataset_path=a.jsonl", "use_sft=true"]
        )
    assert f"works: record_fields='{works}'" in str(error.value)
