"""Samples that share rows, inside a program: where each begins and ends, and its hash.

Shapes: M rows, L slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.system.hashing import halves_of, slot_lanes


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


def sample_hashes(rows: Any) -> jax.Array:
    """Returns the hashes of the samples of packed rows, those of the samples as rows of their own.

    Args:
      rows: `tokens`, `segments`, `weights` and `begins`, [M, L].

    Returns:
      uint32[M L, 2]: at the last slot of a sample its `row_hashes`, else 0.
    """
    samples = PackedSamples.of(rows.segments, rows.begins)
    places, segments = samples.places_MxL, samples.segments_MxL
    lanes = slot_lanes(jnp, places, rows.tokens, segments, rows.weights)
    # a slot of padding at each place of an own row
    slots_MxL = jax.lax.broadcasted_iota(jnp.int32, places.shape, 1)
    padding_MxL = jnp.broadcast_to(samples.padding_Mx1, places.shape)
    nothing = jnp.zeros_like(places)
    of_padding = slot_lanes(jnp, slots_MxL, padding_MxL, nothing, jnp.zeros_like(rows.weights))

    def own_sum(lane_MxL: jax.Array, padding_lane_MxL: jax.Array) -> jax.Array:
        """Returns, at a sample's last slot, the lane's sum over the sample's own row."""
        until, padding_until = (
            jnp.cumsum(lane, axis=1, dtype=jnp.uint32) for lane in (lane_MxL, padding_lane_MxL)
        )
        before = jnp.take_along_axis(until - lane_MxL, slots_MxL - places, axis=1)
        behind = padding_until[:, -1:] - jnp.take_along_axis(padding_until, places, axis=1)
        return until - before + behind

    halves = halves_of(*map(own_sum, lanes, of_padding))
    is_last = samples.is_last_MxL.astype(jnp.uint32)
    hashes: jax.Array = jnp.stack([half * is_last for half in halves], axis=-1).reshape(-1, 2)
    return hashes
