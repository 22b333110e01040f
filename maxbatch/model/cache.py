"""The key-value cache: what the tokens that come later need of those that are there.

Reference: Shazeer 2019, Fast Transformer Decoding (https://arxiv.org/abs/1911.02150), section 2.4, "incremental".

Shapes: N layers, B rows, L slots of a row, T tokens that come in, K key and value heads, h head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Indexed as `cache.at[layer, rows, :, positions]`, but so that each device sees its own rows only: for the latter the
# compiler sends all new keys and values to all devices.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 3),
    scatter_dims_to_operand_dims=(0, 3),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


class Cache(NamedTuple):
    """Keys, rotated, and values of every layer. A token at position i of its row lies in slot i.

    Heads come before slots, as the products read them: the other way round every token would transpose the cache (a
    step of attention, 32 rows of 512 slots on a CPU: half the time).

    A slot beyond a row's last token may hold anything: no token sees a slot after its own, and a token writes its own
    slot before it looks.
    """

    keys_NxBxKxLxh: jax.Array
    values_NxBxKxLxh: jax.Array

    @property
    def length(self) -> int:
        """L: tokens that a row has room for."""
        return self.keys_NxBxKxLxh.shape[3]

    def with_room_for(self, length: int) -> Cache:
        """Return the cache with more slots behind."""
        more = [(0, 0), (0, 0), (0, 0), (0, length - self.length), (0, 0)]
        return Cache(jnp.pad(self.keys_NxBxKxLxh, more), jnp.pad(self.values_NxBxKxLxh, more))

    def write(
        self, layer: jax.Array | int, positions_BxT: jax.Array, k_BxTxKxh: jax.Array, v_BxTxKxh: jax.Array
    ) -> Cache:
        """Return the cache with the keys and values of T neighbouring tokens of each row, in one layer.

        As many tokens as there are slots are those of all slots.
        """

        whole = positions_BxT.shape[1] == self.length
        slots_BxTx2 = jnp.stack([jnp.full_like(positions_BxT, layer), positions_BxT], axis=-1)

        def written(cache_NxBxKxLxh: jax.Array, new_BxTxKxh: jax.Array) -> jax.Array:
            if whole:
                return cache_NxBxKxLxh.at[layer].set(new_BxTxKxh.swapaxes(1, 2))
            return jax.lax.scatter(
                cache_NxBxKxLxh, slots_BxTx2, new_BxTxKxh, _ROW_BY_ROW, unique_indices=True
            )

        return Cache(written(self.keys_NxBxKxLxh, k_BxTxKxh), written(self.values_NxBxKxLxh, v_BxTxKxh))

    def of_layer(self, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Return a layer's keys and values, [B, K, L, h]."""
        return self.keys_NxBxKxLxh[layer], self.values_NxBxKxLxh[layer]
