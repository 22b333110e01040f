"""Visits in a ring by plain JAX, one block of queries after the other.

Shapes: M micro-batch, H query heads, K key and value heads, G = H / K, p tokens of a part, b of a
block of queries, h head_dim, v width of a value.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxbatch.model.ring_visits import HIDDEN, Gradients, Keys, Known, Place, Queries, Seen
from maxbatch.model.scores import ScoreRules, soft_capped

T = TypeVar("T")
_BLOCK_TOKENS = 512  # of queries whose scores are in memory at a time, of parts that they divide


class BlockVisits(NamedTuple):
    """The plain computation of a visit."""

    rules: ScoreRules

    def seen(self, queries: Queries, keys: Keys, place: Place) -> Seen:
        """Returns the softmaxes of queries over keys; see `Visits`."""

        def of_block(block: tuple[jax.Array, Queries]) -> Seen:
            start, queries = block
            logits = self._logits(queries.q_MxHxpxh, keys.k_MxKxpxh, queries, keys, place, start)
            log_sums = jax.nn.logsumexp(logits, axis=-1)
            weights = jnp.exp(logits - log_sums[..., None]).astype(keys.v_MxKxpxv.dtype)
            values = jnp.einsum(
                "mkgbp,mkpv->mkgbv", weights, keys.v_MxKxpxv, preferred_element_type=jnp.float32
            )
            return Seen(_of_heads(values), _of_heads(log_sums))

        of_blocks: Seen = jax.lax.map(of_block, _blocks(queries))
        return _joined(of_blocks)

    def gradients(self, queries: Queries, keys: Keys, known: Known, place: Place) -> Gradients:
        """Returns the gradients that come of queries and keys; see `Visits`."""

        def add(
            sums: tuple[jax.Array, jax.Array], block: tuple[jax.Array, tuple[Queries, Known]]
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            start, (queries, known) = block
            of_q, *of_keys = self._gradients_of_block(queries, keys, known, place, start)
            return (sums[0] + of_keys[0], sums[1] + of_keys[1]), of_q

        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
        (of_k, of_v), of_q = jax.lax.scan(add, (zeros[0], zeros[1]), _blocks((queries, known)))
        return Gradients(_joined(of_q), of_k, of_v)

    def _gradients_of_block(
        self, queries: Queries, keys: Keys, known: Known, place: Place, start: jax.Array
    ) -> Gradients:
        v = keys.v_MxKxpxv
        logits, gradients_of = jax.vjp(
            lambda q, k: self._logits(q, k, queries, keys, place, start),
            queries.q_MxHxpxh,
            keys.k_MxKxpxh,
        )
        log_sums, slopes, means = (_by_key_head(x, v.shape[1]) for x in known)
        weights = jnp.exp(logits - log_sums[..., None])
        of_weights = jnp.einsum(
            "mkgbv,mkpv->mkgbp", slopes.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        of_q, of_k = gradients_of(weights * (of_weights - means[..., None]))
        of_v = jnp.einsum("mkgbp,mkgbv->mkpv", weights, slopes.astype(jnp.float32))
        return Gradients(of_q, of_k.astype(jnp.float32), of_v)

    def _logits(
        self,
        q: jax.Array,
        k: jax.Array,
        queries: Queries,
        keys: Keys,
        place: Place,
        start: jax.Array,
    ) -> jax.Array:
        """Returns the scores of a block of queries, float32[M, K, G, b, p]; `HIDDEN` where a query
        does not see a key.

        Args:
          q, k: in place of those of `queries` and `keys`, to differentiate.
          start: the first query of the block in its part.
        """
        grouped = _by_key_head(q, k.shape[1])
        logits = jnp.einsum("mkgbh,mkph->mkgbp", grouped, k, preferred_element_type=jnp.float32)
        logits = soft_capped(logits, self.rules.soft_cap)
        query_places = place.query + start + jnp.arange(q.shape[2])
        key_places = place.key + jnp.arange(k.shape[2])
        distances = query_places[:, None] - key_places[None, :]
        visible = distances >= 0
        if place.is_local is not False:
            near = self.rules.near(distances, None)
            visible &= near if place.is_local is True else near | ~place.is_local
        same = queries.segments_Mxp[:, :, None] == keys.segments_Mxp[:, None, :]
        return jnp.where((visible[None] & same)[:, None, None], logits, HIDDEN)


def _blocks(tree: T) -> tuple[jax.Array, T]:
    """Returns the first query of each block, and arrays of a part in blocks, on the first axis."""
    tokens = jax.tree.leaves(tree)[0].shape[2]
    block = tokens if tokens % _BLOCK_TOKENS else _BLOCK_TOKENS

    def cut(x: jax.Array) -> jax.Array:
        axis = min(x.ndim - 1, 2)  # of the tokens; segments have no heads before it
        blocks = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    blocks: T = jax.tree.map(cut, tree)
    return jnp.arange(0, tokens, block), blocks


def _joined(tree: T) -> T:
    """Returns arrays with heads from their blocks; undoes `_blocks`."""

    def joined(x: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(x, 0, 2)
        return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])

    whole: T = jax.tree.map(joined, tree)
    return whole


def _by_key_head(x_MxHxetc: jax.Array, kv_heads: int) -> jax.Array:
    """Returns [M, K, G, ...]."""
    rows, heads, *rest = x_MxHxetc.shape
    return x_MxHxetc.reshape(rows, kv_heads, heads // kv_heads, *rest)


def _of_heads(x_MxKxGxetc: jax.Array) -> jax.Array:
    """Returns [M, H, ...]; undoes `_by_key_head`."""
    rows, kv_heads, groups, *rest = x_MxKxGxetc.shape
    return x_MxKxGxetc.reshape(rows, kv_heads * groups, *rest)
