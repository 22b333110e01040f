"""Unknown keys: all at once in one line, other frameworks' words from their table, and hints that
mislead nobody.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.around.words import FRAMEWORKS, Word, look_up, rows
from maxbatch.cli import main
from maxbatch.config.sections import KEYS
from maxbatch.config.unknown import misspelt
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
    for first in range(len(FOREIGN) - 2):
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


def test_a_batch_of_prompts_is_told_from_the_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "batch_size=32", "--devices", "1", "--json"]) == 0
    assert "counts prompts" in (said := capsys.readouterr().err) and "global_batch_size" in said
