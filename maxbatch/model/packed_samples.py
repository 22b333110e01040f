"""Samples that share rows, inside a program: where each begins and ends, sums over it, its hash.

A sample of several rows of its own counts as one sample for each of them.

Shapes: M rows of a shard of a pass, L slots, K rows that a sample has on its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.system.hashing import slot_lanes


class PackedSamples(NamedTuple):
    """The samples of rows, by slot; what it states of slots without a token means nothing."""

    first_MxL: jax.Array  # int32: the slot of the sample's first token
    last_MxL: jax.Array  # int32: the slot of its last one
    segments_MxL: jax.Array  # int32: the slot's segment in the sample's own row; 0 without a token
    padding_Mx1: jax.Array  # int32: the token that pads the samples' own rows

    @classmethod
    def of(cls, segments_MxL: jax.Array, begins_MxL: jax.Array) -> PackedSamples:
        """Finds the samples of rows.

        Args:
          begins_MxL: int32, 1 + the token that pads a sample's own row at its first token, else 0.
        """
        slots_MxL, last = _slots(segments_MxL), segments_MxL.shape[1] - 1
        first_MxL = jax.lax.cummax(jnp.where(begins_MxL > 0, slots_MxL, 0), axis=1)
        before_MxL = jnp.take_along_axis(segments_MxL, first_MxL, axis=1) - 1
        ends_MxL = jnp.pad((begins_MxL > 0) | (segments_MxL == 0), [(0, 0), (0, 1)])[:, 1:]
        ends_MxL |= slots_MxL == last
        last_MxL = jax.lax.cummin(jnp.where(ends_MxL, slots_MxL, last), axis=1, reverse=True)
        own_MxL = jnp.where(segments_MxL != 0, segments_MxL - before_MxL, 0)
        padding_Mx1 = jnp.max(begins_MxL, axis=1, keepdims=True) - 1
        return cls(first_MxL, last_MxL, own_MxL, padding_Mx1)

    @property
    def places_MxL(self) -> jax.Array:
        """The place of each slot in its sample's own row, int32."""
        return _slots(self.first_MxL) - self.first_MxL

    @property
    def is_last_MxL(self) -> jax.Array:
        """Whether a slot holds the last token of a sample."""
        return (_slots(self.first_MxL) == self.last_MxL) & (self.segments_MxL != 0)

    def row_lanes(
        self,
        tokens_MxL: jax.Array,
        weights_MxL: jax.Array,
        part_MxL: jax.Array | None = None,
        rows_per_sample: int = 1,
    ) -> list[jax.Array]:
        """Returns both lanes (`slot_lanes`) of the own row of each slot's sample, summed over that
        row, its padding included: uint32[M, L] each.

        Args:
          part_MxL: int32, which of its sample's own rows a slot is of, if they are hashed as one
            row of K L slots; None: each is hashed by itself.
          rows_per_sample: K.
        """
        slots_MxL = _slots(tokens_MxL)
        length, nothing = tokens_MxL.shape[1], jnp.zeros_like(slots_MxL)
        parts_MxL = nothing if part_MxL is None else part_MxL
        of_tokens = slot_lanes(
            jnp,
            self.places_MxL + length * parts_MxL,
            tokens_MxL,
            self.segments_MxL + parts_MxL,
            weights_MxL,
        )
        lanes = [sums_in_samples(lane, self.first_MxL, self.last_MxL) for lane in of_tokens]

        padding_MxL = jnp.broadcast_to(self.padding_Mx1, tokens_MxL.shape)
        of_sample_MxL = self.last_MxL - self.first_MxL  # the place of its last token
        for part in range(rows_per_sample):
            is_part_MxL = (parts_MxL == part).astype(jnp.uint32)
            of_padding = slot_lanes(
                jnp, slots_MxL + length * part, padding_MxL, nothing, jnp.zeros_like(weights_MxL)
            )
            for number, lane in enumerate(of_padding):
                until = jnp.cumsum(lane, axis=1, dtype=jnp.uint32)
                behind = until[:, -1:] - jnp.take_along_axis(until, of_sample_MxL, axis=1)
                lanes[number] += is_part_MxL * behind
        return lanes


def sums_in_samples(x: jax.Array, first_MxL: jax.Array, last_MxL: jax.Array) -> jax.Array:
    """Returns, at each slot, the sum over the slots of its sample: [M, L, ...], whole numbers.

    Args:
      x: whole numbers of each slot, [M, L, ...].
      first_MxL, last_MxL: int32, the first and the last slot of each slot's sample.
    """
    shape = (*first_MxL.shape, *[1] * (x.ndim - 2))
    until = jnp.cumsum(x, axis=1, dtype=x.dtype)
    before = jnp.take_along_axis(until - x, first_MxL.reshape(shape), axis=1)
    sums: jax.Array = jnp.take_along_axis(until, last_MxL.reshape(shape), axis=1) - before
    return sums


def _slots(x_MxL: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, x_MxL.shape, 1)
