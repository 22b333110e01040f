"""The key-value cache: the keys and values of past tokens, for those that follow.

Reference: Shazeer 2019, Fast Transformer Decoding (https://arxiv.org/abs/1911.02150), section 2.4,
"incremental".

Shapes: N layers, B rows, L slots of a row, T new tokens, K key and value heads, h head_dim; Q
prompts, P slots of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.parallel.sharding import Constrain

# As `cache.at[layer, rows, :, positions]`, but each device writes its own rows only. With the plain
# form the compiler sends all new keys and values to all devices.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 3),
    scatter_dims_to_operand_dims=(0, 3),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


class Cache(NamedTuple):
    """The rotated keys and the values of every layer. A token at position i of its row has slot i.

    Heads come before slots, in the order in which the products read them. The other order would
    transpose the cache for every token (half the time of attention with 32 rows of 512 slots on a
    CPU).

    Slots after a row's last token may hold anything: no token sees a slot after its own, and a
    token writes its slot before it reads.

    Rows may begin behind a prompt that they share with their neighbours, whose slots lie in
    `prompts` once (Hydragen, Juravsky et al. 2024, https://arxiv.org/abs/2402.05099). Their own
    slots then begin at position `starts_B`.
    """

    keys_NxBxKxLxh: jax.Array
    values_NxBxKxLxh: jax.Array
    prompts: Cache | None = None  # of Q rows, each the prompt of B / Q neighbours
    # int32, in [0, P); slots of a prompt from there on are not read
    starts_B: jax.Array | None = None

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
        """Returns an empty cache of `length` slots per row, whose prompts are this cache up to
        `starts_B`.
        """

        def empty(prompts_NxQxKxPxh: jax.Array) -> jax.Array:
            layers, _, heads, _, width = prompts_NxQxKxPxh.shape
            return jnp.zeros((layers, starts_B.size, heads, length, width), prompts_NxQxKxPxh.dtype)

        return Cache(empty(self.keys_NxBxKxLxh), empty(self.values_NxBxKxLxh), self, starts_B)

    def layer(self, layer: jax.Array | int) -> Cache:
        """Returns the cache of one layer, whose arrays lack the first axis."""
        keys_BxKxLxh, values_BxKxLxh = (array[layer] for array in self[:2])
        return Cache(
            keys_BxKxLxh, values_BxKxLxh, self.prompts and self.prompts.layer(layer), self.starts_B
        )

    def write(
        self,
        layer: jax.Array | int,
        positions_BxT: jax.Array,
        k_BxTxKxh: jax.Array,
        v_BxTxKxh: jax.Array,
    ) -> Cache:
        """Returns the cache with the keys and values of T neighbouring tokens of each row in one
        layer.
        """
        whole = positions_BxT.shape[1] == self.length  # a plain assignment is cheaper than scatter
        if self.starts_B is not None:
            positions_BxT = positions_BxT - self.starts_B[:, None]
        slots_BxTx2 = jnp.stack([jnp.full_like(positions_BxT, layer), positions_BxT], axis=-1)

        def written(cache_NxBxKxLxh: jax.Array, new_BxTxKxh: jax.Array) -> jax.Array:
            if whole:
                return cache_NxBxKxLxh.at[layer].set(new_BxTxKxh.swapaxes(1, 2))
            return jax.lax.scatter(
                cache_NxBxKxLxh, slots_BxTx2, new_BxTxKxh, _ROW_BY_ROW, unique_indices=True
            )

        return self._replace(
            keys_NxBxKxLxh=written(self.keys_NxBxKxLxh, k_BxTxKxh),
            values_NxBxKxLxh=written(self.values_NxBxKxLxh, v_BxTxKxh),
        )


class StateCache(NamedTuple):
    """The states of every layer, which do not grow with the rows, and the inputs of their
    convolutions.

    Shapes beside those above: H value heads, k and v widths of a key and a value, W width of the
    convolutions.
    """

    states_NxBxHxkxv: jax.Array  # float32
    # of the last W - 1 tokens, as queries, keys and values: NxBxWxHxh
    inputs: tuple[jax.Array, jax.Array, jax.Array]
    # int32: tokens from this position on change nothing; None: all do
    ends_B: jax.Array | None = None

    def with_room_for(self, length: int) -> StateCache:
        """Returns the cache as it is: a state takes no slots."""
        del length
        return self

    def before(self, starts_B: jax.Array, length: int) -> StateCache:
        """Returns the states of Q prompts for the B / Q rows behind each. They must end at
        `starts_B`.
        """
        del length
        states, inputs = jax.tree.map(
            lambda x: jnp.repeat(x, starts_B.size // x.shape[1], axis=1), self[:2]
        )
        return StateCache(states, inputs)

    def layer(self, layer: jax.Array | int) -> StateCache:
        """Returns the cache of one layer, whose arrays lack the first axis."""
        states_BxHxkxv, inputs = jax.tree.map(lambda x: x[layer], self[:2])
        return StateCache(states_BxHxkxv, inputs, self.ends_B)

    def write(
        self,
        layer: jax.Array | int,
        positions_BxT: jax.Array,
        states_BxHxkxv: jax.Array,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
    ) -> StateCache:
        """Returns the cache after T neighbouring tokens of each row in one layer, with inputs of
        [B, T, H, h] each.
        """
        num_tokens = positions_BxT.shape[1]

        def last(whole_NxBxWxHxh: jax.Array, new_BxTxHxh: jax.Array) -> jax.Array:
            width = whole_NxBxWxHxh.shape[2]
            all_of_them = jnp.concatenate([whole_NxBxWxHxh[layer], new_BxTxHxh], axis=1)
            if self.ends_B is None:
                return whole_NxBxWxHxh.at[layer].set(all_of_them[:, num_tokens:])
            num_read_B = jnp.clip(self.ends_B - positions_BxT[:, 0], 0, num_tokens)
            places_BxW = num_read_B[:, None] + jnp.arange(width)[None]
            return whole_NxBxWxHxh.at[layer].set(
                jnp.take_along_axis(all_of_them, places_BxW[..., None, None], axis=1)
            )

        queries, keys, values = map(last, self.inputs, inputs)
        states = self.states_NxBxHxkxv.at[layer].set(states_BxHxkxv)
        return self._replace(states_NxBxHxkxv=states, inputs=(queries, keys, values))


class Room(NamedTuple):
    """The room that caches of a model have."""

    num_dense: int  # first layers without experts
    num_stacked: int  # the other layers, or cycles of them
    num_rows: int
    length: int  # slots of a row
    ends_B: jax.Array | None  # as `StateCache.ends_B`

    def slots(
        self, kv_heads: int, widths: tuple[int, int], dtype: jnp.dtype, constrain: Constrain
    ) -> Cache:
        """Returns an empty cache of keys and values of these widths."""
        layers = self.num_dense + self.num_stacked
        keys, values = (
            constrain(
                jnp.zeros((layers, self.num_rows, kv_heads, self.length, width), dtype),
                (None, "batch", "kv_heads", None, "head_dim"),
            )
            for width in widths
        )
        return Cache(keys, values)


class NewTokens(NamedTuple):
    """T neighbouring tokens that follow those in the cache of a layer, as the layer sees them."""

    positions_BxT: jax.Array  # int32: their places in their rows, and their slots
    cache: Cache | StateCache
    layer: jax.Array | int  # its number in the cache


class Caches(NamedTuple):
    """The caches of a model: one for each place in its cycle of layers, which may have heads of its
    own.

    The last place has attention in every family.
    """

    places: tuple[Cache | StateCache, ...]

    @property
    def starts_B(self) -> jax.Array | None:
        """As `Cache.starts_B`."""
        return self._slots.starts_B

    @property
    def num_prompts(self) -> int:
        """Prompts that rows begin behind, Q; 0: none."""
        prompts = self._slots.prompts
        return prompts.keys_NxBxKxLxh.shape[1] if prompts else 0

    @property
    def num_positions(self) -> int:
        """The largest number of tokens of a row with its prompt."""
        return self._slots.num_positions

    def with_room_for(self, length: int) -> Caches:
        """Returns the caches with slots added at the end."""
        return self.each(lambda cache: cache.with_room_for(length))

    def before(self, starts_B: jax.Array, length: int) -> Caches:
        """Returns empty caches whose prompts are these, as `Cache.before`."""
        return self.each(lambda cache: cache.before(starts_B, length))

    @property
    def _slots(self) -> Cache:
        last = self.places[-1]
        assert isinstance(last, Cache), "a cycle ends with attention"
        return last

    def each(self, change: Callable[[Cache | StateCache], Cache | StateCache]) -> Caches:
        """Returns the caches, changed alike."""
        return Caches(tuple(map(change, self.places)))
