"""Ring attention: rows split over devices, whose keys and values go around them.

Every device keeps its queries. The keys and values of each device visit all n devices, and each
visit updates the softmaxes (Liu et al. 2023, https://arxiv.org/abs/2310.01889). No device ever
holds the keys of a whole row. The backward pass goes around once more, and the gradients of keys
and values travel with them.

A balanced ring attends in the order of `balanced_rows`: a device's share then has two parts.

Shapes: M micro-batch, L length of a row, l of a device's share, p of a part, H query heads, K key
and value heads, G = H / K, h head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxbatch.model.balanced_rows import collected, dealt
from maxbatch.model.placed_heads import PlacedHeads
from maxbatch.model.scores import ScoreRules, soft_capped
from maxbatch.parallel.sharding import Constrain

T = TypeVar("T")
_HIDDEN = -1e30  # the score of a token that is not seen
_BLOCK_TOKENS = 512  # of queries whose scores are in memory at a time, of lengths that they divide


def ring_attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxh: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns causal attention within segments, as `attend` of attention.py does, with rows split
    over the axis `context`.

    Few key heads may be repeated (`PlacedHeads`).

    Args:
      constrain: with a mesh, whose context axis splits L. Rows of odd shares stay in order.
    """
    mesh = constrain.mesh
    assert mesh is not None, "a ring has devices"
    batch, context, tensor, k_MxLxKxh, v_MxLxKxh = PlacedHeads.of(
        q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, constrain
    )
    assert context is not None, "the axis of the ring splits rows"
    if sinks_H is None:
        sinks_H = jnp.full(q_MxLxHxh.shape[2], _HIDDEN, jnp.float32)

    is_local = jnp.asarray(scores.is_local)  # traced where a loop runs layers of both kinds
    size = mesh.shape[context]
    ring = _Ring(
        context,
        size,
        scores._replace(
            scale=scores.scale or q_MxLxHxh.shape[-1] ** -0.5,
            is_local=scores.is_local is not False,
            is_balanced=scores.is_balanced and q_MxLxHxh.shape[1] % (2 * size) == 0,
        ),
    )
    of_heads, of_tokens = P(batch, context, tensor, None), P(batch, context)
    attended: jax.Array = jax.shard_map(
        partial(_attend_here, ring),
        mesh=mesh,
        in_specs=(_Operands(of_heads, of_heads, of_heads, of_tokens, P(tensor), P()),),
        out_specs=of_heads,
        check_vma=False,  # custom gradients do not say over which axes they vary
    )(
        _Operands(
            q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, segments_MxL, sinks_H.astype(jnp.float32), is_local
        )
    )
    return attended


class _Ring(NamedTuple):
    """The devices of a ring, and the rules of its scores."""

    axis: str
    size: int
    scores: ScoreRules  # with a scale; `is_local` is whether any layer may be

    @property
    def num_parts(self) -> int:
        """The parts of a device's share."""
        return 2 if self.scores.is_balanced else 1

    def parts(self, tree: T, axis: int = 1) -> list[T]:
        """Returns the parts of arrays of a share."""
        split = [jnp.split(x, self.num_parts, axis=axis) for x in jax.tree.leaves(tree)]
        return [
            jax.tree.unflatten(jax.tree.structure(tree), part) for part in zip(*split, strict=True)
        ]

    def starts(self, device: jax.Array, part_tokens: int) -> list[jax.Array]:
        """Returns the place in the row of the first token of each part of a device."""
        numbers = [device, 2 * self.size - 1 - device][: self.num_parts]
        return [number * part_tokens for number in numbers]

    def pairs(
        self, device: jax.Array, part_tokens: int, is_local: jax.Array
    ) -> Iterator[tuple[int, int, _Place]]:
        """Yields each part of this device's queries with each part of a device's keys, and their
        place.
        """
        of_queries = self.starts(jax.lax.axis_index(self.axis), part_tokens)
        of_keys = self.starts(device, part_tokens)
        for a, b in itertools.product(range(self.num_parts), repeat=2):
            yield a, b, _Place(of_queries[a], of_keys[b], is_local)

    def sent(self, tree: T) -> T:
        """Returns what the device before had."""
        following = [(i, (i + 1) % self.size) for i in range(self.size)]
        sent: T = jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, following), tree)
        return sent

    def dealt(self, x: jax.Array) -> jax.Array:
        """Returns this device's parts, from the shares of the row in order; tokens on axis 1."""
        return dealt(x, self.axis, self.size) if self.num_parts > 1 else x

    def collected(self, x: jax.Array) -> jax.Array:
        """Returns this device's share of the row, from the parts of all; undoes `dealt`."""
        return collected(x, self.axis, self.size) if self.num_parts > 1 else x

    def around(self, visit: Callable[[T, _Keys, jax.Array], T], state: T, keys: _Keys) -> T:
        """Returns the state after the visits of all devices' keys, this device's own first.

        Args:
          visit: (state, keys, their device) -> state.
        """
        device = jax.lax.axis_index(self.axis)

        def turn(number: jax.Array, carried: tuple[T, _Keys]) -> tuple[T, _Keys]:
            state, keys = carried
            keys = self.sent(keys)
            return visit(state, keys, (device - number) % self.size), keys

        state = visit(state, keys, device)
        after: T = jax.lax.fori_loop(1, self.size, turn, (state, keys))[0]
        return after


class _Operands(NamedTuple):
    """What attention reads; inside of `shard_map` this device's share of it."""

    q_MxLxHxh: Any  # arrays, or their partitions
    k_MxLxKxh: Any
    v_MxLxKxh: Any
    segments_MxL: Any
    sinks_H: Any  # float32
    is_local: Any


class _Keys(NamedTuple):
    """What goes around a ring."""

    k_MxlxKxh: jax.Array
    v_MxlxKxh: jax.Array
    segments_Mxl: jax.Array


class _Queries(NamedTuple):
    q_MxlxHxh: jax.Array
    segments_Mxl: jax.Array


class _Seen(NamedTuple):
    """The softmaxes of queries over the keys that were seen so far, in float32."""

    peak_MxKxGxp: jax.Array  # the largest scores
    sum_MxKxGxp: jax.Array  # of exp(score - peak)
    values_MxKxGxpxh: jax.Array  # the sum of exp(score - peak) x value


class _Known(NamedTuple):
    """What the backward pass knows of queries before it sees keys, in float32."""

    log_sums_MxKxGxp: jax.Array  # of the exponentials of their scores
    means_MxKxGxp: jax.Array  # of the gradients of their weights, by their weights
    slopes_MxKxGxpxh: jax.Array  # the gradients of what they read


class _Place(NamedTuple):
    """Where in the row the first query and the first key of two parts are."""

    query: jax.Array
    key: jax.Array
    is_local: jax.Array

    def if_seen(self, step: Callable[..., T], state: T, *arguments: Any) -> T:
        """Returns the state after a step, or as it is if no query comes after a key."""
        after: T = jax.lax.cond(
            self.key <= self.query, step, lambda state, *_: state, state, *arguments, self
        )
        return after


def _attend_here(ring: _Ring, operands: _Operands) -> jax.Array:
    """Returns the attention of this device's share of each row, inside of `shard_map`."""
    q, k, v, segments = (ring.dealt(x) for x in operands[:4])
    return ring.collected(_attended(ring, _Operands(q, k, v, segments, *operands[4:])))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(ring: _Ring, operands: _Operands) -> jax.Array:
    return _forward(ring, operands)[0]


def _forward(
    ring: _Ring, operands: _Operands
) -> tuple[jax.Array, tuple[_Operands, jax.Array, jax.Array]]:
    """Returns the attention, and what its gradient needs."""
    q, k, v, segments, sinks_H, is_local = operands
    rows, share, heads, _ = q.shape
    kv_heads, part_tokens = k.shape[2], share // ring.num_parts
    by_head = (rows, kv_heads, heads // kv_heads, part_tokens)
    peak = jnp.broadcast_to(sinks_H.reshape(1, *by_head[1:3], 1), by_head)
    # A sink is a key without a value. One that is hidden adds nothing beside a score.
    seen = _Seen(peak, jnp.ones(by_head), jnp.zeros((*by_head, v.shape[-1])))
    queries = ring.parts(_Queries(q, segments))

    def visit(all_seen: list[_Seen], keys: _Keys, device: jax.Array) -> list[_Seen]:
        all_seen, keys_of_parts = list(all_seen), ring.parts(keys)
        for a, b, place in ring.pairs(device, part_tokens, is_local):
            see = partial(_see, ring.scores)
            all_seen[a] = place.if_seen(see, all_seen[a], queries[a], keys_of_parts[b])
        return all_seen

    all_seen = ring.around(visit, [seen] * ring.num_parts, _Keys(k, v, segments))
    attended = jnp.concatenate(
        [_by_token(seen.values_MxKxGxpxh / seen.sum_MxKxGxp[..., None]) for seen in all_seen],
        axis=1,
    ).astype(q.dtype)
    log_sums = jnp.concatenate(
        [seen.peak_MxKxGxp + jnp.log(seen.sum_MxKxGxp) for seen in all_seen], axis=3
    )
    return attended, (operands, attended, log_sums)


def _see(scores: ScoreRules, seen: _Seen, queries: _Queries, keys: _Keys, place: _Place) -> _Seen:
    """Returns the softmaxes of queries that have seen more keys, block by block."""

    def see(block: tuple[jax.Array, _Seen, _Queries]) -> _Seen:
        start, seen, queries = block
        return _see_block(scores, seen, queries, keys, place._replace(query=place.query + start))

    blocks: _Seen
    blocks = jax.lax.map(see, (_starts(queries), _cut(seen, axis=3), _cut(queries, axis=1)))
    return _joined(blocks, axis=3)


def _see_block(
    scores: ScoreRules, seen: _Seen, queries: _Queries, keys: _Keys, place: _Place
) -> _Seen:
    logits = _logits(scores, queries.q_MxlxHxh, keys.k_MxlxKxh, queries, keys, place)
    peak = jnp.maximum(seen.peak_MxKxGxp, jnp.max(logits, axis=-1))
    shrink, exp = jnp.exp(seen.peak_MxKxGxp - peak), jnp.exp(logits - peak[..., None])
    values = jnp.einsum(
        "mkgql,mlkh->mkgqh",
        exp.astype(keys.v_MxlxKxh.dtype),
        keys.v_MxlxKxh,
        preferred_element_type=jnp.float32,
    )
    return _Seen(
        peak,
        seen.sum_MxKxGxp * shrink + jnp.sum(exp, axis=-1),
        seen.values_MxKxGxpxh * shrink[..., None] + values,
    )


def _backward(
    ring: _Ring, residuals: tuple[_Operands, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[_Operands]:
    """Returns the gradients of queries, keys, values and sinks."""
    (q, k, v, segments, sinks_H, is_local), attended, log_sums = residuals
    kv_heads, part_tokens = k.shape[2], q.shape[1] // ring.num_parts
    slopes = _by_head(gradient, kv_heads)
    # of the softmax's sum: what a weight's gradient is measured from
    means = jnp.sum(slopes * _by_head(attended, kv_heads), axis=-1)
    queries = ring.parts(_Queries(q, segments))
    known = ring.parts(_Known(log_sums, means, slopes), axis=3)
    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))

    def visit(state: Any, keys: _Keys, device: jax.Array) -> Any:
        of_queries, of_keys, keys_of_parts = list(state[0]), ring.parts(state[1]), ring.parts(keys)
        for a, b, place in ring.pairs(device, part_tokens, is_local):
            add, sums = partial(_add_gradients, ring.scores), (of_queries[a], of_keys[b])
            of_queries[a], of_keys[b] = place.if_seen(
                add, sums, queries[a], keys_of_parts[b], known[a]
            )
        joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *of_keys)
        # Gradients of keys travel with their keys; after the last visit they are at home.
        return of_queries, ring.sent(joined)

    start = [zeros(part.q_MxlxHxh) for part in queries], zeros((k, v))
    of_queries, (of_k, of_v) = ring.around(visit, start, _Keys(k, v, segments))
    weight_of_sinks = jnp.exp(sinks_H.reshape(1, kv_heads, -1, 1) - log_sums)
    of_sinks = -jnp.sum(weight_of_sinks * means, axis=(0, 3)).reshape(-1)
    of_q = jnp.concatenate(of_queries, axis=1).astype(q.dtype)
    nothing: Any = None  # of numbers that have no gradient
    return (
        _Operands(of_q, of_k.astype(k.dtype), of_v.astype(v.dtype), nothing, of_sinks, nothing),
    )


def _add_gradients(
    scores: ScoreRules,
    sums: tuple[jax.Array, tuple[jax.Array, jax.Array]],
    queries: _Queries,
    keys: _Keys,
    known: _Known,
    place: _Place,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Adds the gradients that come of two parts: of the queries, and of keys and values; block by
    block of queries.
    """

    def add(
        of_keys: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array, _Queries, _Known]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        start, of_queries, queries, known = block
        moved = place._replace(query=place.query + start)
        of_queries, of_keys = _add_gradients_of_block(
            scores, (of_queries, of_keys), queries, keys, known, moved
        )
        return of_keys, of_queries

    sums_of_queries, sums_of_keys = sums
    blocks = (
        _starts(queries),
        _cut(sums_of_queries, axis=1),
        _cut(queries, axis=1),
        _cut(known, axis=3),
    )
    sums_of_keys, of_blocks = jax.lax.scan(add, sums_of_keys, blocks)
    return _joined(of_blocks, axis=1), sums_of_keys


def _add_gradients_of_block(
    scores: ScoreRules,
    sums: tuple[jax.Array, tuple[jax.Array, jax.Array]],
    queries: _Queries,
    keys: _Keys,
    known: _Known,
    place: _Place,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    v = keys.v_MxlxKxh
    logits, gradients_of = jax.vjp(
        lambda q, k: _logits(scores, q, k, queries, keys, place),
        queries.q_MxlxHxh,
        keys.k_MxlxKxh,
    )
    weights = jnp.exp(logits - known.log_sums_MxKxGxp[..., None])
    of_weights = jnp.einsum(
        "mkgqh,mlkh->mkgql",
        known.slopes_MxKxGxpxh.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    of_q, of_k = gradients_of(weights * (of_weights - known.means_MxKxGxp[..., None]))
    of_v = jnp.einsum("mkgql,mkgqh->mlkh", weights, known.slopes_MxKxGxpxh)
    sum_of_q, (sum_of_k, sum_of_v) = sums
    return sum_of_q + of_q.astype(jnp.float32), (
        sum_of_k + of_k.astype(jnp.float32),
        sum_of_v + of_v,
    )


_attended.defvjp(_forward, _backward)


def _logits(
    scores: ScoreRules,
    q: jax.Array,
    k: jax.Array,
    queries: _Queries,
    keys: _Keys,
    place: _Place,
) -> jax.Array:
    """Returns the scores of queries and keys, float32[M, K, G, queries, keys]; `_HIDDEN` where a
    query does not see a key.
    """
    (rows, num_queries, heads, width), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(rows, num_queries, kv_heads, heads // kv_heads, width)
    logits = jnp.einsum("mqkgh,mlkh->mkgql", grouped, k, preferred_element_type=jnp.float32)
    assert scores.scale is not None
    logits = soft_capped(logits * scores.scale, scores.soft_cap)

    query_places = place.query + jnp.arange(num_queries)
    key_places = place.key + jnp.arange(k.shape[1])
    distances = query_places[:, None] - key_places[None, :]
    visible = distances >= 0
    if scores.is_local:
        visible &= scores.near(distances, None) | ~place.is_local
    same = queries.segments_Mxl[:, :, None] == keys.segments_Mxl[:, None, :]
    return jnp.where((visible[None] & same)[:, None, None], logits, _HIDDEN)


def _starts(queries: _Queries) -> jax.Array:
    """Returns the place of the first query of each block of a part."""
    tokens = queries.q_MxlxHxh.shape[1]
    return jnp.arange(0, tokens, _block_tokens(tokens))


def _block_tokens(tokens: int) -> int:
    return tokens if tokens % _BLOCK_TOKENS else _BLOCK_TOKENS


def _cut(tree: T, axis: int) -> T:
    """Returns arrays in blocks of queries, the blocks on the first axis."""

    def cut(x: jax.Array) -> jax.Array:
        block = _block_tokens(x.shape[axis])
        blocks = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    blocks: T = jax.tree.map(cut, tree)
    return blocks


def _joined(tree: T, axis: int) -> T:
    """Returns arrays of blocks in one; undoes `_cut`."""

    def joined(x: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(x, 0, axis)
        return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])

    whole: T = jax.tree.map(joined, tree)
    return whole


def _by_head(x_MxlxHxh: jax.Array, kv_heads: int) -> jax.Array:
    """Returns float32[M, K, G, l, h]."""
    rows, tokens, heads, width = x_MxlxHxh.shape
    grouped = x_MxlxHxh.reshape(rows, tokens, kv_heads, heads // kv_heads, width)
    return grouped.transpose(0, 2, 3, 1, 4).astype(jnp.float32)


def _by_token(x_MxKxGxlxh: jax.Array) -> jax.Array:
    """Returns [M, l, H, h]; undoes `_by_head`."""
    rows, kv_heads, groups, tokens, width = x_MxKxGxlxh.shape
    return x_MxKxGxlxh.transpose(0, 3, 1, 2, 4).reshape(rows, tokens, kv_heads * groups, width)
