from __future__ import annotations

import string
from fractions import Fraction

import numpy as np
import pytest

from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.data.stream.stream import open_stream
from maxbatch.data.stream.synthetic import SyntheticRows
from tests.helpers.corpus import synthetic_config

NONE = HeldOutFraction(Fraction(0))


def make(
    samples=10**12, row_length=64, seed=0, token_range=256, split=NONE, held_out=False
) -> SyntheticRows:
    return SyntheticRows(samples, row_length, seed, token_range, split, held_out)


def test_a_row_is_a_function_of_seed_and_number_alone() -> None:
    together = make().batch([5, 0, 10**11, 5])["tokens"]
    for place, row in enumerate([5, 0, 10**11, 5]):
        assert np.array_equal(make().batch([row])["tokens"][0], together[place])
    assert not np.array_equal(make(seed=1).batch([5])["tokens"], make().batch([5])["tokens"])


@pytest.mark.parametrize(("row_length", "token_range"), [(8, 256), (32, 256), (12, 20), (32, 100)])
def test_rows_are_told_apart_by_their_tokens(row_length: int, token_range: int) -> None:
    tokens = make(row_length=row_length, token_range=token_range).batch(range(6000))["tokens"]
    assert len(np.unique(tokens, axis=0)) == 6000


def test_rows_look_like_text() -> None:
    text = bytes(make().batch([3])["tokens"][0].astype(np.uint8)).decode()
    assert set(text) <= set(string.ascii_lowercase + " ")
    assert all(len(word) == 3 for word in text.split())


@pytest.mark.parametrize("token_range", [1, 2, 3, 50, 127, 128, 200, 256])
def test_tokens_stay_below_the_vocabulary(token_range: int) -> None:
    tokens = make(token_range=token_range).batch(range(50))["tokens"]
    assert tokens.min() >= 0 and tokens.max() < token_range
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("row_length", [2, 63, 64, 65])
def test_a_row_is_one_full_segment(row_length: int) -> None:
    rows = make(row_length=row_length).batch([0, 1])
    assert all(array.shape == (2, row_length) for array in rows.values())
    assert (rows["segments"] == 1).all()
    assert (rows["weights"][:, 0] == 0).all() and (rows["weights"][:, 1:] == 1).all()


def test_what_follows_a_word_can_be_learned() -> None:
    words = make(row_length=256).batch(range(2000))["tokens"].reshape(2000, 64, 4)[:, 3:]
    words = words @ np.array([1, 256, 256**2, 0])
    followers: dict[int, dict[int, int]] = {}
    for now, then in zip(
        words[:, :-1].ravel().tolist(), words[:, 1:].ravel().tolist(), strict=True
    ):
        counts = followers.setdefault(now, {})
        counts[then] = counts.get(then, 0) + 1
    four_best = sum(sum(sorted(counts.values())[-4:]) for counts in followers.values())
    assert 0.85 < four_best / words[:, 1:].size < 0.95, "four strides, and some noise"


def test_held_out_rows_are_no_training_rows_and_none_is_lost() -> None:
    split = HeldOutFraction(Fraction(1, 10))
    train, held_out = make(samples=95, split=split), make(samples=95, split=split, held_out=True)
    assert (train.num_rows, held_out.num_rows) == (86, 9)
    parts = np.concatenate([train.batch(range(86))["tokens"], held_out.batch(range(9))["tokens"]])
    everything = make(samples=95).batch(range(95))["tokens"]
    assert np.array_equal(np.unique(parts, axis=0), np.unique(everything, axis=0))
    assert len(np.unique(parts, axis=0)) == 95


def test_no_rows_are_no_rows() -> None:
    stream = open_stream(synthetic_config())
    assert {name: array.shape for name, array in stream.batch([]).items()} == dict.fromkeys(
        ("tokens", "segments", "weights"), (0, stream.samples.row_length)
    )
