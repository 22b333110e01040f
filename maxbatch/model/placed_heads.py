"""Heads as a mesh splits them, for attention that is placed on the devices by hand."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.parallel.sharding import Constrain


class PlacedHeads(NamedTuple):
    """The mesh axes that split queries, and keys and values whose heads the same axes split.

    Shapes: M micro-batch, L length, H query heads, K key and value heads, h head_dim.
    """

    batch: tuple[str, ...] | str | None
    length: str | None
    heads: tuple[str, ...] | str | None
    k_MxLxKxh: jax.Array
    v_MxLxKxh: jax.Array

    @classmethod
    def of(
        cls, q_MxLxHxh: jax.Array, k_MxLxKxh: jax.Array, v_MxLxKxh: jax.Array, constrain: Constrain
    ) -> PlacedHeads:
        """Finds the axes. If they split the query heads and cannot split the key heads, these are
        repeated, one for each query head.
        """
        batch, length, heads, _ = constrain.spec(
            q_MxLxHxh.shape, ("batch", "length", "heads", "head_dim")
        )
        of_keys = constrain.spec(k_MxLxKxh.shape, ("batch", "length", "kv_heads", "head_dim"))
        if of_keys[2] != heads:
            repeats = q_MxLxHxh.shape[2] // k_MxLxKxh.shape[2]
            k_MxLxKxh, v_MxLxKxh = (jnp.repeat(x, repeats, axis=2) for x in (k_MxLxKxh, v_MxLxKxh))
        return cls(batch, length, heads, k_MxLxKxh, v_MxLxKxh)
