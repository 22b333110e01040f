"""Ring attention: rows split over devices, whose keys and values go around them.

Every device keeps its queries. The keys and values of each device visit all n devices, and each
visit updates the softmaxes (Liu et al. 2023, https://arxiv.org/abs/2310.01889). No device ever
holds the keys of a whole row. The backward pass goes around once more, and the gradients of keys
and values travel with them. What is sent during a visit does not depend on it, so both may overlap.

A balanced ring attends in the order of `balanced_rows`: a device's share then has two parts.

Shapes: M micro-batch, L length of a row, l of a device's share, p of a part, H query heads, K key
and value heads, h head_dim, v width of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxbatch.model.balanced_rows import collected, dealt
from maxbatch.model.placed_heads import PlacedHeads
from maxbatch.model.ring_blocks import BlockVisits
from maxbatch.model.ring_splash import SplashVisits
from maxbatch.model.ring_visits import HIDDEN, Keys, Known, Place, Queries, Seen, Visits
from maxbatch.model.scores import ScoreRules
from maxbatch.parallel.remat import CONTEXT, kept
from maxbatch.parallel.sharding import Constrain
from maxbatch.plan.program import LANES

T = TypeVar("T")
# (a part of this device's queries, one of the visiting keys, their place in the row, state) -> state
# keys and values, [M, K, p, h] and [M, K, p, v], or in compressed form and rotated columns, [M, p, c] and [M, p, r]
_Sources = tuple[jax.Array, jax.Array]
_Step = Callable[[int, int, Place, T], T]
_Visit = Callable[[_Step[T], T], T]  # (step, state) -> state


def ring_attend(
    q_MxLxHxh: jax.Array,
    k_MxLxKxh: jax.Array,
    v_MxLxKxv: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns causal attention within segments, as `attend` of attention.py does, with rows split
    over the axis `context`.

    Few key heads may be repeated (`PlacedHeads`). Parts that splash kernels cannot see, since 128
    does not divide them, are seen by plain JAX.

    Args:
      constrain: with a mesh, whose context axis splits L. Rows of odd shares stay in order.
    """
    *axes, k_MxLxKxh, v_MxLxKxv = PlacedHeads.of(q_MxLxHxh, k_MxLxKxh, v_MxLxKxv, constrain)
    sources = k_MxLxKxh, v_MxLxKxv
    return _attend_on_mesh(axes, q_MxLxHxh, sources, None, segments_MxL, constrain, scores, sinks_H)


def ring_attend_to_compressed(
    q_MxLxHxh: jax.Array,
    compressed_MxLxc: jax.Array,
    rotated_MxLxr: jax.Array,
    up_cxHxe: jax.Array,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules,
) -> jax.Array:
    """Returns what `ring_attend` does, of keys and values that visit in a compressed form, of which
    each device makes them.

    Args:
      rotated_MxLxr: the last columns of every head's keys.
      up_cxHxe: makes the other columns of each head's keys, and then its values.
    """
    *axes, _ = constrain.spec(q_MxLxHxh.shape, ("batch", "length", "heads", "head_dim"))
    sources = compressed_MxLxc, rotated_MxLxr
    return _attend_on_mesh(axes, q_MxLxHxh, sources, up_cxHxe, segments_MxL, constrain, scores)


def _attend_on_mesh(
    axes: Sequence[Any],
    q_MxLxHxh: jax.Array,
    sources: _Sources,
    up_cxHxe: jax.Array | None,
    segments_MxL: jax.Array,
    constrain: Constrain,
    scores: ScoreRules,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention to keys and values, or to their compressed form if there is a matrix
    that makes them of it; `axes` of the mesh split rows, length and heads.
    """
    (batch, context, tensor), mesh = axes, constrain.mesh
    assert mesh is not None and context is not None, "the axis of the ring splits rows"
    if sinks_H is None:
        sinks_H = jnp.full(q_MxLxHxh.shape[2], HIDDEN, jnp.float32)
    size, length = mesh.shape[context], q_MxLxHxh.shape[1]
    scale = scores.scale or q_MxLxHxh.shape[-1] ** -0.5
    num_parts = 2 if scores.is_balanced and length % (2 * size) == 0 else 1
    is_local = scores.is_local if isinstance(scores.is_local, bool) else None
    rules = scores._replace(scale=1.0, is_local=is_local is not False)
    visits: Visits = BlockVisits(rules)
    if scores.implementation == "splash" and length % (num_parts * size * LANES) == 0:
        visits = SplashVisits(rules, num_parts * size, constrain.platform == "cpu")
    ring = _Ring(context, size, num_parts, rules, is_local, visits)

    def attend_here(
        q: jax.Array, sources: _Sources, segments: jax.Array, *others: jax.Array | None
    ) -> jax.Array:
        # Scaled in float32: rounding the scale to bfloat16 would shift every score alike.
        if scale != 1.0:
            q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        queries, first, second, segments_of_parts = map(ring.parts, (q, *sources, segments))
        operands = _Operands(
            [Queries(*part) for part in zip(queries, segments_of_parts, strict=True)],
            [
                _Visitor(part[:2], part[2])
                for part in zip(first, second, segments_of_parts, strict=True)
            ],
            *others,
        )
        return ring.share(_attended(ring, operands))

    of_heads, of_tokens = P(batch, context, tensor, None), P(batch, context)
    of_sources = of_heads if up_cxHxe is None else P(batch, context, None)
    attended: jax.Array = jax.shard_map(
        attend_here,
        mesh=mesh,
        in_specs=(of_heads, of_sources, of_tokens, P(None, tensor, None), P(tensor), P()),
        out_specs=of_heads,
        check_vma=False,  # custom gradients do not say over which axes they vary
    )(
        q_MxLxHxh,
        sources,
        segments_MxL,
        up_cxHxe,
        sinks_H.astype(jnp.float32),
        jnp.asarray(scores.is_local),
    )
    return attended


class _Visitor(NamedTuple):
    """A part of a device's keys, which goes around the ring."""

    sources: _Sources
    segments_Mxp: jax.Array


class _Ring(NamedTuple):
    """The devices of a ring, and the computation of their visits."""

    axis: str
    size: int
    num_parts: int  # of a device's share
    rules: ScoreRules
    is_local: bool | None  # whether the layer is; None: an operand states it
    visits: Visits

    def parts(self, x_Mxletc: jax.Array) -> list[jax.Array]:
        """Returns the parts of this device from its share of rows: [M, H, p, h], or [M, p]."""
        in_turn = x_Mxletc
        if self.num_parts > 1:
            in_turn = dealt(x_Mxletc, self.axis, self.size)
        parts = jnp.split(in_turn, self.num_parts, axis=1)
        return [part.swapaxes(1, 2) if part.ndim == 4 else part for part in parts]

    def share(self, parts_MxHxpxv: list[jax.Array]) -> jax.Array:
        """Returns this device's share of rows, [M, l, H, v]; undoes `parts`."""
        in_turn = jnp.concatenate([part.swapaxes(1, 2) for part in parts_MxHxpxv], axis=1)
        return collected(in_turn, self.axis, self.size) if self.num_parts > 1 else in_turn

    def sent(self, tree: T) -> T:
        """Returns the arrays of the device before."""
        following = [(i, (i + 1) % self.size) for i in range(self.size)]
        sent: T = jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, following), tree)
        return sent

    def around(
        self,
        first: Callable[[list[_Visitor], _Visit[Any]], T],
        more: Callable[[T, list[_Visitor], _Visit[Any]], T],
        operands: _Operands,
    ) -> T:
        """Returns the state after the visits of all devices' keys.

        Args:
          first: (visitors, visit) -> state; the visit of this device's own keys.
          more: (state, visitors, visit) -> state; the visit of another device's.
        """
        here, own = jax.lax.axis_index(self.axis), operands.visitors
        is_local = operands.is_local if self.is_local is None else self.is_local
        place = partial(self._place, own[0].segments_Mxp.shape[1], is_local)

        def turn(number: Any, carried: tuple[T, list[_Visitor]]) -> tuple[T, list[_Visitor]]:
            state, visitors = carried
            following = self.sent(visitors)
            visit = partial(self._visit, place, (here - number) % self.size)
            return more(state, visitors, visit), following

        carried = first(own, partial(self._own_visit, place)), self.sent(own)
        if self.size > 2:
            carried = jax.lax.fori_loop(1, self.size - 1, turn, carried)
        state, visitors = carried
        return more(state, visitors, partial(self._visit, place, (here + 1) % self.size))

    def _own_visit(self, place: Callable[..., Place], step: _Step[T], state: T) -> T:
        here = jax.lax.axis_index(self.axis)
        for b, a in combinations_with_replacement(range(self.num_parts), 2):
            state = step(a, b, place(here, a, b, is_same=a == b), state)
        return state

    def _visit(self, place: Callable[..., Place], device: jax.Array, step: _Step[T], state: T) -> T:
        """Returns the state after the visit of another device's keys.

        A late part sees all early ones. An early part, as the only one, sees that of a device
        before, and a late one that of a device behind.
        """

        def of_part(part: int, state: T) -> T:
            return step(part, part, place(device, part, part), state)

        if self.num_parts > 1:
            state = step(1, 0, place(device, 1, 0), state)
        behind = partial(of_part, 1) if self.num_parts > 1 else lambda state: state
        after: T = jax.lax.cond(
            device < jax.lax.axis_index(self.axis), partial(of_part, 0), behind, state
        )
        return after

    def _place(
        self,
        tokens: int,
        is_local: jax.Array | bool,
        device: jax.Array,
        a: int,
        b: int,
        *,
        is_same: bool = False,
    ) -> Place:
        """Returns the place of a part of this device's queries and one of a device's keys."""
        here = jax.lax.axis_index(self.axis)
        starts = self._starts(here, tokens)[a], self._starts(device, tokens)[b]
        return Place(*starts, tokens, is_same, is_local)

    def _starts(self, device: jax.Array, tokens: int) -> list[jax.Array]:
        """Returns the place in the row of the first token of each part of a device."""
        numbers = [device, 2 * self.size - 1 - device][: self.num_parts]
        return [number * tokens for number in numbers]


class _Operands(NamedTuple):
    """The operands of attention on one device."""

    queries: list[Queries]
    visitors: list[_Visitor]  # its own keys
    up_cxHxe: Any  # makes keys and values of what visits; None: they visit themselves
    sinks_H: Any  # float32
    is_local: Any  # bool, if the ring does not state it


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(ring: _Ring, operands: _Operands) -> list[jax.Array]:
    """Returns the attention of each part, [M, H, p, v]."""
    return _forward(ring, operands)[0]


def _forward(ring: _Ring, operands: _Operands) -> tuple[list[jax.Array], Any]:
    """Returns the attention, and what its gradient needs."""
    queries, visitors, up_cxHxe, sinks_H, _ = operands
    rows, heads, tokens, width = queries[0].q_MxHxpxh.shape
    values = jax.eval_shape(partial(_keys, width), visitors, up_cxHxe)[0].v_MxKxpxv
    # A sink is a key without a value. A hidden one adds nothing beside a score.
    start = Seen(
        jnp.zeros((rows, heads, tokens, values.shape[-1])),
        jnp.broadcast_to(sinks_H[None, :, None], (rows, heads, tokens)),
    )

    def more(
        all_seen: list[Seen], visitors: list[_Visitor], visit: _Visit[list[Seen]]
    ) -> list[Seen]:
        keys = _keys(width, visitors, up_cxHxe)

        def step(a: int, b: int, place: Place, all_seen: list[Seen]) -> list[Seen]:
            see = partial(_see, ring.visits, queries[a], keys[b], place)
            return _with(all_seen, a, place.if_near(ring.rules, see, all_seen[a]))

        return visit(step, all_seen)

    all_seen = ring.around(partial(more, [start] * ring.num_parts), more, operands)
    attended = [
        kept(seen.values_MxHxpxv.astype(queries[0].q_MxHxpxh.dtype), CONTEXT) for seen in all_seen
    ]
    log_sums = [kept(seen.log_sums_MxHxp, CONTEXT) for seen in all_seen]
    return attended, (operands, attended, log_sums)


def _keys(width: int, visitors: list[_Visitor], up_cxHxe: jax.Array | None) -> list[Keys]:
    """Returns the keys and values that visit, or those of their compressed form that does.

    Args:
      width: of a key.
    """
    if up_cxHxe is None:
        return [Keys(*visitor.sources, visitor.segments_Mxp) for visitor in visitors]
    keys = []
    for (compressed_Mxpxc, rotated_Mxpxr), segments_Mxp in visitors:
        up_MxHxpxe = jnp.einsum("mpc,che->mhpe", compressed_Mxpxc, up_cxHxe)
        unrotated, v_MxHxpxv = jnp.split(up_MxHxpxe, [width - rotated_Mxpxr.shape[-1]], axis=-1)
        shared = jnp.broadcast_to(
            rotated_Mxpxr[:, None], (*unrotated.shape[:3], rotated_Mxpxr.shape[-1])
        )
        keys.append(Keys(jnp.concatenate([unrotated, shared], axis=-1), v_MxHxpxv, segments_Mxp))
    return keys


def _with(parts: list[T], number: int, part: T) -> list[T]:
    return [*parts[:number], part, *parts[number + 1 :]]


def _see(visits: Visits, queries: Queries, keys: Keys, place: Place, seen: Seen) -> Seen:
    return seen.joined(visits.seen(queries, keys, place))


def _backward(ring: _Ring, residuals: Any, slopes: list[jax.Array]) -> tuple[_Operands]:
    """Returns the gradients of queries, keys, values and sinks, or of the compressed form and its
    matrix.
    """
    operands, attended, log_sums = residuals
    queries, visitors, up_cxHxe, sinks_H, _ = operands
    known = [
        # a weight's gradient is measured from the mean, which is of the softmax's sum
        Known(log_sums, slopes, _mean(slopes, attended))
        for log_sums, slopes, attended in zip(log_sums, slopes, attended, strict=True)
    ]

    def gradients(sums: _Sums, visitors: list[_Visitor], visit: _Visit[Any]) -> _Sums:
        """Returns the sums with those of a visit, and this one's alone of what visits."""
        keys, of_sources = _keys_and_gradients(queries[0].q_MxHxpxh.shape[-1], visitors, up_cxHxe)

        def step(a: int, b: int, place: Place, sums: Any) -> Any:
            of_queries, of_keys = sums
            add = partial(_add_gradients, ring.visits, queries[a], keys[b], known[a], place)
            of_q, of_k = place.if_near(ring.rules, add, (of_queries[a], of_keys[b]))
            return _with(of_queries, a, of_q), _with(of_keys, b, of_k)

        of_queries, of_keys = visit(step, (sums.queries, [_zeros(part[:2]) for part in keys]))
        of_visitors, of_up = of_sources(of_keys)
        return _Sums(of_queries, of_visitors, _added(sums.up_cxHxe, of_up))

    def more(sums: _Sums, visitors: list[_Visitor], visit: _Visit[Any]) -> _Sums:
        # Gradients of keys travel behind their keys; after the last visit they go home.
        arrived = ring.sent(sums.sources)
        sums = gradients(sums, visitors, visit)
        return sums._replace(sources=_added(arrived, sums.sources))

    nothing: Any = None  # of numbers that have no gradient
    start = _Sums([_zeros(part.q_MxHxpxh) for part in queries], nothing, _zeros(up_cxHxe))
    sums = ring.around(partial(gradients, start), more, operands)
    of_sinks = sum(
        -jnp.sum(
            jnp.exp(sinks_H[None, :, None] - part.log_sums_MxHxp) * part.means_MxHxp, axis=(0, 2)
        )
        for part in known
    )
    of_sources = ring.sent(sums.sources)
    of_queries, of_sources, of_up = jax.tree.map(
        lambda x, like: x.astype(like.dtype),
        (sums.queries, of_sources, sums.up_cxHxe),
        ([part.q_MxHxpxh for part in queries], [part.sources for part in visitors], up_cxHxe),
    )
    return (
        _Operands(
            [Queries(of_q, nothing) for of_q in of_queries],
            [_Visitor(of_part, nothing) for of_part in of_sources],
            of_up,
            of_sinks,
            nothing,
        ),
    )


class _Sums(NamedTuple):
    """Sums of gradients, in float32."""

    queries: list[jax.Array]
    sources: list[_Sources]
    up_cxHxe: jax.Array | None


def _keys_and_gradients(
    width: int, visitors: list[_Visitor], up_cxHxe: jax.Array | None
) -> tuple[list[Keys], Callable[[Any], tuple[Any, Any]]]:
    """Returns what `_keys` does, and the function that turns gradients of keys and values into
    those of what visits, and of the matrix.
    """
    if up_cxHxe is None:
        return _keys(width, visitors, None), lambda of_keys: (of_keys, None)

    def made(sources: list[_Sources], up_cxHxe: jax.Array) -> list[_Sources]:
        visiting = [
            _Visitor(part, visitor.segments_Mxp)
            for part, visitor in zip(sources, visitors, strict=True)
        ]
        return [part[:2] for part in _keys(width, visiting, up_cxHxe)]

    keys_values, of_sources = jax.vjp(made, [part.sources for part in visitors], up_cxHxe)
    keys = [
        Keys(*part, visitor.segments_Mxp)
        for part, visitor in zip(keys_values, visitors, strict=True)
    ]

    def turned(of_keys: list[_Sources]) -> tuple[Any, Any]:
        rounded = jax.tree.map(lambda x, like: x.astype(like.dtype), of_keys, keys_values)
        in_float32: tuple[Any, Any] = jax.tree.map(
            lambda x: x.astype(jnp.float32), of_sources(rounded)
        )
        return in_float32

    return keys, turned


def _zeros(tree: T) -> T:
    zeros: T = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)
    return zeros


def _added(tree: T, more: T) -> T:
    added: T = jax.tree.map(jnp.add, tree, more)
    return added


def _mean(slopes: jax.Array, attended: jax.Array) -> jax.Array:
    """Returns the means of the gradients of weights, by these weights: float32[M, H, p]."""
    return jnp.sum(slopes.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)


def _add_gradients(
    visits: Visits, queries: Queries, keys: Keys, known: Known, place: Place, sums: Any
) -> Any:
    of_q, *of_keys = visits.gradients(queries, keys, known, place)
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, (of_q, tuple(of_keys)))


_attended.defvjp(_forward, _backward)
