"""The key-value cache: the keys and values of past tokens, for those that follow.

Reference: Shazeer 2019, Fast Transformer Decoding (https://arxiv.org/abs/1911.02150), section 2.4, "incremental".

Shapes: N layers, B rows, L slots of a row, T new tokens, K key and value heads, h head_dim; Q prompts, P slots of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# As `cache.at[layer, rows, :, positions]`, but each device writes its own rows only. With the plain form the compiler
# sends all new keys and values to all devices.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 3),
    scatter_dims_to_operand_dims=(0, 3),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


class Cache(NamedTuple):
    """The rotated keys and the values of every layer. A token at position i of its row has slot i.

    DeepSeek's attention has one head: its values are the latents, its keys the latents and the rotated part.

    Heads come before slots, in the order in which the products read them. The other order would transpose the cache for
    every token (half the time of attention with 32 rows of 512 slots on a CPU).

    Slots after a row's last token may hold anything: no token sees a slot after its own, and a token writes its slot
    before it reads.

    Rows may begin behind a prompt that they share with their neighbours, whose slots lie in `prompts` once (Hydragen,
    Juravsky et al. 2024, https://arxiv.org/abs/2402.05099). Their own slots then begin at position `starts_B`.
    """

    keys_NxBxKxLxh: jax.Array
    values_NxBxKxLxh: jax.Array
    prompts: Cache | None = None  # of Q rows, each the prompt of B / Q neighbours
    starts_B: jax.Array | None = None  # int32, in [0, P); slots of a prompt from there on are not read

    @property
    def length(self) -> int:
        """The number of slots of a row, L."""
        return self.keys_NxBxKxLxh.shape[3]

    @property
    def num_positions(self) -> int:
        """The largest number of tokens of a row with its prompt."""
        return self.length + (self.prompts.length if self.prompts else 0)

    def with_room_for(self, length: int) -> Cache:
        """Returns the cache with slots added at the end."""
        more = [(0, 0), (0, 0), (0, 0), (0, length - self.length), (0, 0)]
        keys, values = (jnp.pad(array, more) for array in self[:2])
        return self._replace(keys_NxBxKxLxh=keys, values_NxBxKxLxh=values)

    def before(self, starts_B: jax.Array, length: int) -> Cache:
        """Returns an empty cache of `length` slots per row, whose prompts are this cache up to `starts_B`."""

        def empty(prompts_NxQxKxPxh: jax.Array) -> jax.Array:
            layers, _, heads, _, width = prompts_NxQxKxPxh.shape
            return jnp.zeros((layers, starts_B.size, heads, length, width), prompts_NxQxKxPxh.dtype)

        return Cache(empty(self.keys_NxBxKxLxh), empty(self.values_NxBxKxLxh), self, starts_B)

    def layer(self, layer: jax.Array | int) -> Cache:
        """Returns the cache of one layer, whose arrays lack the first axis."""
        keys_BxKxLxh, values_BxKxLxh = (array[layer] for array in self[:2])
        return Cache(keys_BxKxLxh, values_BxKxLxh, self.prompts and self.prompts.layer(layer), self.starts_B)

    def write(
        self, layer: jax.Array | int, positions_BxT: jax.Array, k_BxTxKxh: jax.Array, v_BxTxKxh: jax.Array
    ) -> Cache:
        """Returns the cache with the keys and values of T neighbouring tokens of each row in one layer."""
        whole = positions_BxT.shape[1] == self.length
        if self.starts_B is not None:
            positions_BxT = positions_BxT - self.starts_B[:, None]
        slots_BxTx2 = jnp.stack([jnp.full_like(positions_BxT, layer), positions_BxT], axis=-1)

        def written(cache_NxBxKxLxh: jax.Array, new_BxTxKxh: jax.Array) -> jax.Array:
            if whole:
                return cache_NxBxKxLxh.at[layer].set(new_BxTxKxh.swapaxes(1, 2))
            return jax.lax.scatter(cache_NxBxKxLxh, slots_BxTx2, new_BxTxKxh, _ROW_BY_ROW, unique_indices=True)

        return self._replace(
            keys_NxBxKxLxh=written(self.keys_NxBxKxLxh, k_BxTxKxh),
            values_NxBxKxLxh=written(self.values_NxBxKxLxh, v_BxTxKxh),
        )


class Caches(NamedTuple):
    """The caches of a model: one for each place in its cycle of layers, which may have heads of its own."""

    places: tuple[Cache, ...]

    @property
    def starts_B(self) -> jax.Array | None:
        """As `Cache.starts_B`."""
        return self.places[0].starts_B

    @property
    def num_prompts(self) -> int:
        """Prompts that rows begin behind, Q; 0: none."""
        prompts = self.places[0].prompts
        return prompts.keys_NxBxKxLxh.shape[1] if prompts else 0

    @property
    def num_positions(self) -> int:
        """The largest number of tokens of a row with its prompt."""
        return self.places[0].num_positions

    def with_room_for(self, length: int) -> Caches:
        """Returns the caches with slots added at the end."""
        return self.each(lambda cache: cache.with_room_for(length))

    def before(self, starts_B: jax.Array, length: int) -> Caches:
        """Returns empty caches whose prompts are these, as `Cache.before`."""
        return self.each(lambda cache: cache.before(starts_B, length))

    def each(self, change: Callable[[Cache], Cache]) -> Caches:
        """Returns the caches, changed alike."""
        return Caches(tuple(map(change, self.places)))
