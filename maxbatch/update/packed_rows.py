"""Sums over the samples of a pass that share rows, and their hashes, inside a program.

Shapes: M rows of a shard of a pass, L slots, N samples, K rows that a sample has on its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from maxbatch.model.packed_samples import PackedSamples
from maxbatch.system.hashing import halves_of

SHARDS = "data_shards"  # the axis of a program's shards of the data axis


def may_be_on_several_shards(rows: Any) -> bool:
    """Returns whether a sample of a pass may lie on several shards of the data axis: one of several
    rows may, whose rows are numbered.
    """
    return getattr(rows, "numbers", None) is not None


def sums_of_samples(x_MxL: jax.Array, numbers_MxL: jax.Array, rows_per_sample: int) -> jax.Array:
    """Sums figures of tokens over each own row of the samples of a pass, whose rows may be on
    several shards of the data axis.

    Args:
      numbers_MxL: int32, 1 + k + K n at the tokens of row k of sample n of the pass, else 0.

    Returns:
      [N, K], the same on all shards (`SHARDS`); N is at least the samples of a pass.
    """
    shards = jax.lax.psum(1, SHARDS)
    here = sums_by_number(x_MxL, numbers_MxL, shards * x_MxL.size, rows_per_sample)
    met: jax.Array = jax.lax.psum(here, SHARDS)
    return met


def sums_by_number(
    x_MxL: jax.Array, numbers_MxL: jax.Array, most: int, rows_per_sample: int
) -> jax.Array:
    """Returns `sums_of_samples` over these rows alone, of at most `most` own rows."""
    place_MxL = jnp.maximum(numbers_MxL - 1, 0)
    summands_MxL = jnp.where(numbers_MxL > 0, x_MxL, jnp.zeros_like(x_MxL))
    sums = jnp.zeros(-(-most // rows_per_sample) * rows_per_sample, x_MxL.dtype)
    sums = sums.at[place_MxL.reshape(-1)].add(summands_MxL.reshape(-1))
    return sums.reshape(-1, rows_per_sample)


def on_one_shard(x: jax.Array) -> jax.Array:
    """Returns a figure that all shards have on the first of them, and 0 on the others."""
    if jax.lax.psum(1, SHARDS) == 1:
        return x
    counted: jax.Array = x * (jax.lax.axis_index(SHARDS) == 0).astype(x.dtype)
    return counted


def sample_hashes(rows: Any, rows_per_sample: int = 1) -> jax.Array:
    """Returns the hashes of the samples of packed rows, those of the samples in rows of their own.

    Args:
      rows: `tokens`, `segments`, `weights` and `begins`, [M, L], and `numbers` of samples of several
        rows.
      rows_per_sample: K.

    Returns:
      uint32[M L, 2]: at the last slot of a sample its `row_hashes`, else 0. Of samples of several
      rows uint32[N, 2], on one shard of the data axis.
    """
    samples = PackedSamples.of(rows.segments, rows.begins)
    is_last = samples.is_last_MxL.astype(jnp.uint32)
    if rows_per_sample == 1:
        sums = samples.row_lanes(rows.tokens, rows.weights)
    else:
        part_MxL = jnp.maximum(rows.numbers - 1, 0) % rows_per_sample  # k
        lanes = samples.row_lanes(rows.tokens, rows.weights, part_MxL, rows_per_sample)
        sums = [
            jnp.sum(
                sums_of_samples(lane * is_last, rows.numbers, rows_per_sample),
                axis=1,
                dtype=jnp.uint32,
            )
            for lane in lanes
        ]
        pieces = sums_of_samples(is_last, rows.numbers, rows_per_sample)
        is_last = on_one_shard((pieces > 0).any(axis=1).astype(jnp.uint32))
    halves = halves_of(*sums)
    hashes: jax.Array = jnp.stack([half * is_last for half in halves], axis=-1).reshape(-1, 2)
    return hashes
