"""Samples that share rows, inside a program: where each begins and ends, and its hash.

Shapes: M rows of a shard of a pass, L slots, K rows that a sample has on its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.system.hashing import halves_of, slot_lanes

SHARDS = "data_shards"  # the axis of a program's shards of the data axis


class PackedSamples(NamedTuple):
    """The samples of rows, by slot; what it states of slots without a token means nothing."""

    first_MxL: jax.Array  # int32: the slot of the sample's first token
    places_MxL: jax.Array  # int32: place of the slot in its sample's own row
    segments_MxL: jax.Array  # int32: its segment there
    is_last_MxL: jax.Array  # bool: whether the slot holds a sample's last token
    padding_Mx1: jax.Array  # int32: the token that pads the samples' own rows

    @classmethod
    def of(cls, segments_MxL: jax.Array, begins_MxL: jax.Array) -> PackedSamples:
        """Finds the samples of rows.

        Args:
          begins_MxL: int32, 1 + the token that pads a sample's own row at its first token, else 0.
        """
        slots_MxL = jax.lax.broadcasted_iota(jnp.int32, segments_MxL.shape, 1)
        first_MxL = jax.lax.cummax(jnp.where(begins_MxL > 0, slots_MxL, 0), axis=1)
        before_MxL = jnp.take_along_axis(segments_MxL, first_MxL, axis=1) - 1
        ends_MxL = jnp.pad((begins_MxL > 0) | (segments_MxL == 0), [(0, 0), (0, 1)])[:, 1:]
        is_end_of_row = slots_MxL == segments_MxL.shape[1] - 1
        return cls(
            first_MxL,
            slots_MxL - first_MxL,
            segments_MxL - before_MxL,
            (ends_MxL | is_end_of_row) & (segments_MxL != 0),
            jnp.max(begins_MxL, axis=1, keepdims=True) - 1,
        )


def sums_of_samples(x_MxL: jax.Array, numbers_MxL: jax.Array, rows_per_sample: int) -> jax.Array:
    """Sums figures of tokens over each own row of the samples of a pass, whose rows may be on
    several shards of the data axis.

    Args:
      numbers_MxL: int32, 1 + k + K n at the tokens of row k of sample n of the pass, else 0.

    Returns:
      [N, K], the same on all shards (`SHARDS`); N is at least the samples of a pass.
    """
    shards = jax.lax.psum(1, SHARDS)
    most = -(-shards * x_MxL.size // rows_per_sample) * rows_per_sample
    place_MxL = jnp.maximum(numbers_MxL - 1, 0)
    summands_MxL = jnp.where(numbers_MxL > 0, x_MxL, jnp.zeros_like(x_MxL))
    sums = jnp.zeros(most, x_MxL.dtype).at[place_MxL.reshape(-1)].add(summands_MxL.reshape(-1))
    met: jax.Array = jax.lax.psum(sums, SHARDS)
    return met.reshape(-1, rows_per_sample)


def on_one_shard(x: jax.Array) -> jax.Array:
    """Returns a figure that all shards have on the first of them, and 0 on the others."""
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
    length = rows.tokens.shape[1]
    slots_MxL = jax.lax.broadcasted_iota(jnp.int32, rows.tokens.shape, 1)
    padding_MxL = jnp.broadcast_to(samples.padding_Mx1, rows.tokens.shape)
    part_MxL = jnp.zeros_like(slots_MxL)  # k
    if rows_per_sample > 1:
        part_MxL = jnp.maximum(rows.numbers - 1, 0) % rows_per_sample
    lanes = slot_lanes(
        jnp,
        samples.places_MxL + length * part_MxL,
        rows.tokens,
        samples.segments_MxL + part_MxL,
        rows.weights,
    )

    def own_sum(lane_MxL: jax.Array) -> jax.Array:
        """Returns, at a piece's last slot, the lane's sum over its tokens."""
        until = jnp.cumsum(lane_MxL, axis=1, dtype=jnp.uint32)
        return until - jnp.take_along_axis(until - lane_MxL, samples.first_MxL, axis=1)

    def behind(lane_MxL: jax.Array) -> jax.Array:
        """Returns the lane's sum over the padding behind a piece in its own row."""
        until = jnp.cumsum(lane_MxL, axis=1, dtype=jnp.uint32)
        return until[:, -1:] - jnp.take_along_axis(until, samples.places_MxL, axis=1)

    sums = list(map(own_sum, lanes))
    for part in range(rows_per_sample):
        nothing = jnp.zeros_like(slots_MxL)
        of_padding = slot_lanes(
            jnp, slots_MxL + length * part, padding_MxL, nothing, jnp.zeros_like(rows.weights)
        )
        is_part = (part_MxL == part).astype(jnp.uint32)
        sums = [s + is_part * behind(lane) for s, lane in zip(sums, of_padding, strict=True)]

    is_last = samples.is_last_MxL.astype(jnp.uint32)
    if rows_per_sample > 1:
        met = [
            jnp.sum(
                sums_of_samples(s * is_last, rows.numbers, rows_per_sample),
                axis=1,
                dtype=jnp.uint32,
            )
            for s in sums
        ]
        pieces = sums_of_samples(is_last, rows.numbers, rows_per_sample)
        sums, is_last = met, on_one_shard((pieces > 0).any(axis=1).astype(jnp.uint32))
    halves = halves_of(*sums)
    hashes: jax.Array = jnp.stack([half * is_last for half in halves], axis=-1).reshape(-1, 2)
    return hashes
