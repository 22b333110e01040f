"""Exact sums are equal in any order and grouping, and as near to the true sum as promised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.plan.reproducible import MOST_ATOMS
from maxbatch.update.reproducible import slabs
from maxbatch.update.reproducible.exact_sums import (
    MOST_SUMMANDS,
    ExactSum,
    empty_bits,
    empty_sum,
    merged,
    merged_and_rounded,
    rounded,
    with_summand,
    with_summand_in_place,
)

CASES, SUMMANDS = 1_000_000, 8
SMALLEST = 2.0**-126


def some_summands(seed: int) -> np.ndarray:
    """Float32 from 1e-38 to 1e38 in each case, half of the cases of similar size, with zeros,
    cancellations, subnormals, infinities and NaN.
    """
    rng = np.random.default_rng(seed)
    shape = SUMMANDS, CASES
    exponents = rng.uniform(-126, 127, shape)
    near = rng.random(CASES) < 0.5
    exponents[:, near] = exponents[0, near] + rng.uniform(-30, 3, (SUMMANDS, near.sum()))
    exponents = np.clip(exponents, -149, 127)
    x = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * 2.0**exponents
    x = x.astype(np.float32)
    x[rng.random(shape) < 0.05] = 0
    cancels = rng.random(CASES) < 0.2
    x[1, cancels] = -x[0, cancels]
    special = rng.random(shape) < 5e-4
    x[special] = rng.choice([np.inf, -np.inf, np.nan], special.sum())
    return x


def sum_of(parts: jax.Array) -> ExactSum:
    total = empty_sum(parts.shape[1:])
    for part in parts:
        total = with_summand(total, part)
    return total


@jax.jit
def in_one(x: jax.Array) -> tuple[ExactSum, jax.Array]:
    total = sum_of(x)
    return total, rounded(total)


@jax.jit
def in_groups(x: jax.Array) -> tuple[ExactSum, jax.Array]:
    groups = [sum_of(group) for group in (x[:3], x[3:4], x[4:])]
    total = merged(jax.tree.map(lambda *parts: jnp.stack(parts), *groups))
    return total, rounded(total)


def bits(tree: object) -> list[np.ndarray]:
    return [np.asarray(x).view(np.int32) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def summands() -> np.ndarray:
    return some_summands(seed=1)


@pytest.fixture(scope="module")
def sums(summands: np.ndarray) -> np.ndarray:
    return np.asarray(in_one(summands)[1])


def test_sums_of_a_million_cases_are_equal_in_any_order_and_grouping(summands: np.ndarray) -> None:
    rng, expected = np.random.default_rng(2), bits(in_one(summands))
    for add_up in (in_one, in_groups):
        shuffled = bits(add_up(summands[rng.permutation(SUMMANDS)]))
        assert all(np.array_equal(a, b) for a, b in zip(shuffled, expected, strict=True)), add_up


def test_errors_are_within_the_bound_and_subnormals_count_as_0(
    summands: np.ndarray, sums: np.ndarray
) -> None:
    is_finite = np.isfinite(summands).all(axis=0)
    x, total = summands[:, is_finite].astype(np.longdouble), sums[is_finite]
    x[np.abs(x) < SMALLEST] = 0
    expected = x.sum(axis=0)
    overflows = np.abs(expected) > np.finfo(np.float32).max
    assert np.isinf(total[overflows]).all() and overflows.any()
    small = np.abs(expected) < SMALLEST
    assert not total[small & (np.abs(expected) < SMALLEST * (1 - 1e-6))].any() and small.any()
    errors = np.abs(total.astype(np.longdouble) - expected)
    bounds = SUMMANDS * 2.0**-24 * np.abs(x).max(axis=0)
    within = (errors <= bounds) | overflows | small
    assert within.all(), summands[:, is_finite][:, ~within][:, :3]


def test_infinities_and_nan_propagate(summands: np.ndarray, sums: np.ndarray) -> None:
    is_special = ~np.isfinite(summands).all(axis=0)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isfinite(summands), 0, summands)[:, is_special].sum(axis=0)
    assert is_special.sum() > 1000
    np.testing.assert_array_equal(sums[is_special], expected)


def test_sums_by_slabs_and_of_stacked_layers_are_those_of_whole_arrays(
    monkeypatch: pytest.MonkeyPatch, summands: np.ndarray
) -> None:
    monkeypatch.setattr(slabs, "_VALUES", 16)
    x = jnp.asarray(summands[:, :210].reshape(SUMMANDS, 2, 7, 15))  # of two layers

    @jax.jit
    def by_slabs(x: jax.Array) -> jax.Array:
        total = empty_bits(x.shape[1:])
        for part in x:
            for layer in (1, 0):
                total = with_summand_in_place(total, part[layer], layer)
        return merged_and_rounded(ExactSum(*(bits[None] for bits in total)))

    assert np.array_equal(bits(by_slabs(x)), bits(in_one(x)[1]))


def test_a_sum_of_the_most_summands_does_not_overflow() -> None:
    assert MOST_SUMMANDS == MOST_ATOMS
    values = np.float32([4095.9, -4095.9, 1 / 3, 0.5 - 2.0**-13, 3e38, -1e-37])

    @jax.jit
    def add_up(x: jax.Array) -> jax.Array:
        total = jax.lax.fori_loop(
            0, MOST_SUMMANDS, lambda _, sums: with_summand(sums, x), empty_sum(x.shape)
        )
        return rounded(total)

    expected = values.astype(np.longdouble) * MOST_SUMMANDS
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.asarray(add_up(values)), expected.astype(np.float32))
