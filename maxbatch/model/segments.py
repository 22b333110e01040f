"""The documents of packed rows, and the places of tokens in them.

Shapes: M micro-batch, L length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """The slots of rows, as layers see them."""

    segments_MxL: jax.Array  # int32: the document of each token, 0 for padding
    # uint32: of the row and the place in it; None in a model without experts
    hashes_MxL: jax.Array | None = None
    # int32: the first and the last slot of each token's sample, in a model with experts whose
    # samples share rows; None: a row is a sample
    first_MxL: jax.Array | None = None
    last_MxL: jax.Array | None = None


def places_in_segments(segments_MxL: jax.Array) -> jax.Array:
    """Returns the place of each token in its document, whose tokens are neighbours: int32[M, L], 0
    for the first.
    """
    places_MxL = jax.lax.broadcasted_iota(jnp.int32, segments_MxL.shape, 1)
    is_first_MxL = (segments_MxL != jnp.roll(segments_MxL, 1, axis=1)) | (places_MxL == 0)
    return places_MxL - jax.lax.cummax(jnp.where(is_first_MxL, places_MxL, 0), axis=1)


def lengths_in_segments(segments_MxL: jax.Array) -> jax.Array:
    """Returns the number of tokens in the document of each token: int32[M, L]."""
    slots_MxL = jax.lax.broadcasted_iota(jnp.int32, segments_MxL.shape, 1)
    length = segments_MxL.shape[1]
    is_last_MxL = (segments_MxL != jnp.roll(segments_MxL, -1, axis=1)) | (slots_MxL == length - 1)
    last_MxL = jax.lax.cummin(jnp.where(is_last_MxL, slots_MxL, length), axis=1, reverse=True)
    return last_MxL - slots_MxL + places_in_segments(segments_MxL) + 1
