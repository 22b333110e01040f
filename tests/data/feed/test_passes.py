"""The passes of an update hold each of its samples once, whole, and follow from lengths alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.data.feed.passes import Passes, packed, token_counts
from maxbatch.data.feed.placement import Batch
from maxbatch.data.stream.rows import RowArrays
from maxbatch.system.hashing import row_hashes
from maxbatch.update.packed_rows import SHARDS, sample_hashes
from tests.programs.passes import (
    check_passes,
    check_passes_of_pairs,
    check_rows_of_any_pass,
    some_lengths,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 9))
def test_no_sample_is_lost_or_doubled_and_no_row_or_pass_is_over_its_size(
    lengths: list[int], rows_per_pass: int
) -> None:
    check_passes(np.array(lengths), 40, rows_per_pass)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1), st.integers(2, 9))
def test_a_pair_is_whole_in_one_pass(lengths: list[tuple[int, int]], rows_per_pass: int) -> None:
    check_passes_of_pairs(np.array(lengths), 40, rows_per_pass)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60))
def test_rows_that_hold_samples_whole_do_not_depend_on_the_pass(
    lengths: list[tuple[int, int]],
) -> None:
    check_rows_of_any_pass(np.array(lengths), 40, 2)
    check_rows_of_any_pass(np.array(lengths)[:, 0], 40, 1)


def test_real_lengths_fill_rows_and_passes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        passes = Passes.of(some_lengths(rng, 256, 4096), 4096, 4)
        assert passes.row_share and passes.row_share >= 0.97
        # or the best that whole passes allow
        fewest = -(-passes.num_tokens // (4 * 4096))
        assert passes.slot_share and (passes.slot_share >= 0.95 or passes.num_passes == fewest)


def some_samples(lengths: np.ndarray, row_length: int, seed: int) -> RowArrays:
    """Samples of some documents each, padded by token 7."""
    rng = np.random.default_rng(seed)
    is_token = np.arange(row_length) < lengths[:, None]
    opens = (rng.random(is_token.shape) < 0.1) & (np.arange(row_length) > 0)
    return {
        "tokens": np.where(is_token, rng.integers(0, 99, is_token.shape), 7).astype(np.int32),
        "segments": np.where(is_token, 1 + np.cumsum(opens, axis=1), 0).astype(np.int32),
        "weights": np.where(is_token, rng.random(is_token.shape) < 0.5, 0).astype(np.float32),
    }


@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_have_the_hashes_of_the_samples_as_rows_of_their_own(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 25, 40)
    lengths[:2] = 24
    samples = some_samples(lengths, 24, seed)
    np.testing.assert_array_equal(token_counts(samples["segments"])[:, 0], lengths)
    rows = packed(samples, Passes.of(lengths, 24, 4))
    hashes = np.asarray(
        jax.jit(sample_hashes)(Batch(**{n: jnp.asarray(x) for n, x in rows.items()}))
    )
    wanted = row_hashes(np, samples["tokens"], samples["segments"], samples["weights"])
    assert len(rows["tokens"]) < len(lengths)
    assert sorted(map(tuple, hashes[hashes.any(axis=1)])) == sorted(
        map(tuple, wanted[wanted.any(axis=1)])
    )


def test_pairs_on_several_shards_have_the_hashes_of_their_own_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 25, 30)
    halves = some_samples(lengths, 24, 0)
    halves["segments"] = (halves["segments"] > 0) * np.tile([[1], [2]], (15, 1)).astype(np.int32)
    pairs = {name: array.reshape(15, 48) for name, array in halves.items()}
    wanted = row_hashes(np, pairs["tokens"], pairs["segments"], pairs["weights"])
    passes = Passes.of(token_counts(pairs["segments"], 2), 24, 4)
    rows = packed(pairs, passes)
    missing = passes.num_passes * 4 - passes.num_rows
    shards = {
        name: jnp.asarray(np.pad(array, ((0, missing), (0, 0))).reshape(-1, 2, 2, 24))
        for name, array in rows.items()
    }
    hashes_of = jax.jit(jax.vmap(lambda rows: sample_hashes(Batch(**rows), 2), axis_name=SHARDS))
    found = []
    for number in range(passes.num_passes):
        hashes = np.asarray(hashes_of({name: x[number] for name, x in shards.items()}))
        found += map(tuple, hashes[hashes.any(axis=-1)])
    assert sorted(found) == sorted(map(tuple, wanted))


def test_documents_of_a_row_stay_apart() -> None:
    lengths = np.array([5, 3, 4, 12, 9])
    samples = some_samples(lengths, 12, 0)
    passes = Passes.of(lengths, 12, 2)
    rows = packed(samples, passes)
    for sample, (row, begin, length) in enumerate(zip(*passes[:3], strict=True)):  # a piece each
        segments = rows["segments"][row, begin : begin + length]
        own = samples["segments"][sample, :length]
        np.testing.assert_array_equal(segments - segments[0], own - own[0])
    for row in rows["segments"]:  # each document once, in order, padding behind
        changes = row[np.flatnonzero(np.diff(row, prepend=0))]
        assert changes[changes != 0].tolist() == list(range(1, row.max() + 1))
