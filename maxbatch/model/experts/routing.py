"""Routing: which experts a token goes to, with which weights, and the sums that balance is computed
from.

Where a token goes is a function of the token alone, in float32. A capacity is counted within a
sample: a row, or a part of one where samples share rows.

Shapes: M micro-batch, L length, E experts, k experts of a token, N layers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.sections import ModelConfig
from maxbatch.model.packed_samples import PackedSamples, sums_in_samples
from maxbatch.model.segments import Slots
from maxbatch.system.hashing import carry, halves_of, limb_sums, mixed, row_hashes

_LAYER, _EXPERT = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_LANES = np.uint32(0x2545F491), np.uint32(0x8F1BBCDC)
_BYTE = np.uint32(0xFF)
_LEAST = 1e-20


class RoutingSums(NamedTuple):
    """Sums over the real tokens of some rows: of one layer, or with a leading axis of layers.

    Each is a plain sum, so those of micro-batches, shards and stages add up to those of the whole
    batch.
    """

    counts_E: jax.Array  # int32: choices of each expert
    # float32: of each expert's score, the scores of a token divided by their sum
    scores_E: jax.Array
    sequence: jax.Array  # float32: of E sum(f P) of each sample, times its tokens
    squares: jax.Array  # float32: of the squared log-sum-exp of the router's logits
    dropped: jax.Array  # int32: choices beyond the capacity of an expert
    # uint32: of the hashes of sample, place, layer and chosen expert, modulo 2^64, in 16-bit limbs
    limbs_4: jax.Array

    def plus(self, other: RoutingSums) -> RoutingSums:
        """Returns the sums over the rows of both."""
        added: RoutingSums = jax.tree.map(jnp.add, self, other)
        return added._replace(limbs_4=carried(added.limbs_4))

    @classmethod
    def nothing(cls, num_layers: int, num_experts: int) -> RoutingSums:
        """Returns the sums over no rows, of all layers."""
        of_experts, layers = (num_layers, num_experts), (num_layers,)
        return cls(
            jnp.zeros(of_experts, jnp.int32),
            jnp.zeros(of_experts, jnp.float32),
            jnp.zeros(layers, jnp.float32),
            jnp.zeros(layers, jnp.float32),
            jnp.zeros(layers, jnp.int32),
            jnp.zeros((num_layers, 4), jnp.uint32),
        )


class Routes(NamedTuple):
    """The experts of tokens."""

    experts_MxLxk: jax.Array  # int32; E: none
    weights_MxLxk: jax.Array  # float32


def carried(limbs_x4: jax.Array) -> jax.Array:
    """Returns 64-bit sums, each in four limbs of 16 bits along the last axis, with every limb below
    2^16.
    """
    return jnp.moveaxis(carry(jnp, jnp.moveaxis(limbs_x4, -1, 0)), 0, -1)


def routed_slots(
    tokens_MxL: jax.Array, segments_MxL: jax.Array, begins_MxL: jax.Array | None = None
) -> Slots:
    """Returns the slots of rows as layers with experts see them.

    Each is hashed from the content of its sample, as a row of its own, and from its place there.

    Args:
      begins_MxL: as `Decoder.hidden` takes it.
    """
    weights_MxL = jnp.zeros(tokens_MxL.shape, jnp.float32)  # whatever is trained on
    if begins_MxL is None:
        hashes_Mx2 = row_hashes(jnp, tokens_MxL, segments_MxL, weights_MxL)
        places_1xL = jnp.arange(tokens_MxL.shape[1], dtype=jnp.uint32)[None]
        return Slots(segments_MxL, _of_place(places_1xL, hashes_Mx2[:, :1], hashes_Mx2[:, 1:]))
    samples = PackedSamples.of(segments_MxL, begins_MxL)
    low_MxL, high_MxL = halves_of(*samples.row_lanes(tokens_MxL, weights_MxL))
    hashes_MxL = _of_place(samples.places_MxL.astype(jnp.uint32), low_MxL, high_MxL)
    return Slots(segments_MxL, hashes_MxL, samples.first_MxL, samples.last_MxL)


def _of_place(places: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the hash of a place in a row, from the two halves of the row's hash."""
    return mixed(mixed(places + low) ^ high)


def choose(
    config: ModelConfig, logits_MxLxE: jax.Array, bias_E: jax.Array | None
) -> tuple[Routes, jax.Array]:
    """Returns the experts of each token, the likeliest first, and its scores of all experts,
    float32[M, L, E].

    Of equal scores the expert with the lower number comes first. The bias changes the choice, and
    no weight. The scores that are returned add up to 1, sigmoid ones divided by their sum.
    """
    is_sigmoid = config.routed_score_func == "sigmoid"
    scores_MxLxE = jax.nn.sigmoid(logits_MxLxE) if is_sigmoid else jax.nn.softmax(logits_MxLxE)
    ranked_MxLxE = scores_MxLxE if bias_E is None else scores_MxLxE + bias_E[None, None]
    ranked_MxLxE = _in_best_groups(config, jax.lax.stop_gradient(ranked_MxLxE))
    _, experts_MxLxk = jax.lax.top_k(ranked_MxLxE, config.num_experts_per_tok)
    weights_MxLxk = jnp.take_along_axis(scores_MxLxE, experts_MxLxk, axis=-1)
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        # and not a quotient, whose gradient is rounding
        weights_MxLxk = jnp.ones_like(weights_MxLxk)
    elif config.norm_topk_prob:
        weights_MxLxk /= _total(weights_MxLxk)
    if config.routed_scaling_factor != 1:
        weights_MxLxk *= config.routed_scaling_factor
    return Routes(experts_MxLxk, weights_MxLxk), scores_MxLxE / _total(
        scores_MxLxE
    ) if is_sigmoid else scores_MxLxE


def _total(scores: jax.Array) -> jax.Array:
    """Returns the sum of positive scores over the last axis, which is kept; sigmoid ones may all be
    rounded to 0.
    """
    return jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _LEAST)


def _in_best_groups(config: ModelConfig, ranked_MxLxE: jax.Array) -> jax.Array:
    """Returns the scores that rank experts, with minus infinity outside of the token's best groups
    (DeepSeek-V3, 2.1.2).
    """
    groups, best = config.n_routing_groups, config.topk_routing_group
    if groups <= 1 or best in (-1, groups):
        return ranked_MxLxE
    by_group = ranked_MxLxE.reshape(*ranked_MxLxE.shape[:-1], groups, -1)
    scores_MxLxG = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
    _, chosen = jax.lax.top_k(scores_MxLxG, best)
    is_chosen_MxLxG = jnp.any(chosen[..., None] == jnp.arange(groups)[None, None, None], axis=2)
    return jnp.where(is_chosen_MxLxG[..., None], by_group, -jnp.inf).reshape(ranked_MxLxE.shape)


def within_rows(
    config: ModelConfig,
    routes: Routes,
    scores_MxLxE: jax.Array,
    logits_MxLxE: jax.Array,
    slots: Slots,
    layer: jax.Array | int,
) -> tuple[Routes, RoutingSums]:
    """Returns the routes of real tokens, within the capacity if there is one, and the sums over the
    samples of the rows.

    Padding goes to no expert, and so do choices beyond the capacity, whose share of the output is
    lost.
    """
    num_experts, experts_MxLxk = config.num_experts, routes.experts_MxLxk
    real_MxL = slots.segments_MxL != 0

    is_chosen_MxLxkxE = (
        experts_MxLxk[..., None] == jnp.arange(num_experts)[None, None, None]
    ) & real_MxL[..., None, None]
    counts_MxE = jnp.sum(is_chosen_MxLxkxE, axis=(1, 2), dtype=jnp.int32)
    scores_MxLxE = jnp.where(real_MxL[..., None], scores_MxLxE, 0.0)
    scores_MxE = jnp.sum(scores_MxLxE, axis=1)
    if slots.first_MxL is None or slots.last_MxL is None:
        samples = _Samples.of_rows(real_MxL, counts_MxE, scores_MxE)
    else:
        counts_MxLxE = jnp.sum(is_chosen_MxLxkxE, axis=2, dtype=jnp.int32)
        samples = _Samples.of_parts(slots.first_MxL, slots.last_MxL, counts_MxLxE, scores_MxLxE)
    # E sum(f P) of a sample, times its tokens: f = counts / (k x tokens), P = scores / tokens.
    share_MxS = num_experts / (
        config.num_experts_per_tok * jnp.maximum(samples.tokens_MxS, 1).astype(jnp.float32)
    )
    even_MxS = share_MxS * jnp.sum(
        samples.counts_MxSxE.astype(jnp.float32) * samples.scores_MxSxE, axis=2
    )
    squares_MxL = jnp.square(jax.nn.logsumexp(logits_MxLxE, axis=-1))

    goes_MxLxk = jnp.broadcast_to(real_MxL[..., None], experts_MxLxk.shape)
    if config.capacity_factor > 0:
        goes_MxLxk &= _fits(config, experts_MxLxk, is_chosen_MxLxkxE, samples)
    num_dropped = jnp.sum(real_MxL[..., None] & ~goes_MxLxk, dtype=jnp.int32)

    sums = RoutingSums(
        jnp.sum(counts_MxE, axis=0, dtype=jnp.int32),
        jnp.sum(scores_MxE, axis=0),
        jnp.sum(even_MxS),
        jnp.sum(jnp.where(real_MxL, squares_MxL, 0.0)),
        num_dropped,
        _fingerprint(slots, experts_MxLxk, layer),
    )
    return Routes(jnp.where(goes_MxLxk, experts_MxLxk, num_experts), routes.weights_MxLxk), sums


class _Samples(NamedTuple):
    """Figures of the samples of rows: of the row that is a sample (S = 1), or at each slot those of
    its own sample (S = L).

    Scores are so split over the slots that their sum over S is the row's.
    """

    tokens_MxS: jax.Array  # int32
    counts_MxSxE: jax.Array  # int32: choices of each expert
    scores_MxSxE: jax.Array  # float32, of the sample's tokens, or of the slot's token alone
    # int32: choices of each expert before the sample in its row; None: it is the row
    before_MxLxE: jax.Array | None

    @classmethod
    def of_rows(cls, real_MxL: jax.Array, counts_MxE: jax.Array, scores_MxE: jax.Array) -> _Samples:
        tokens_MxS = jnp.sum(real_MxL, axis=1, keepdims=True, dtype=jnp.int32)
        return cls(tokens_MxS, counts_MxE[:, None], scores_MxE[:, None], None)

    @classmethod
    def of_parts(
        cls,
        first_MxL: jax.Array,
        last_MxL: jax.Array,
        counts_MxLxE: jax.Array,
        scores_MxLxE: jax.Array,
    ) -> _Samples:
        counts_MxSxE = sums_in_samples(counts_MxLxE, first_MxL, last_MxL)
        before_token_MxLxE = jnp.cumsum(counts_MxLxE, axis=1, dtype=jnp.int32) - counts_MxLxE
        before_MxLxE = jnp.take_along_axis(before_token_MxLxE, first_MxL[..., None], axis=1)
        return cls(last_MxL - first_MxL + 1, counts_MxSxE, scores_MxLxE, before_MxLxE)


def _fits(
    config: ModelConfig, experts_MxLxk: jax.Array, is_chosen_MxLxkxE: jax.Array, samples: _Samples
) -> jax.Array:
    """Returns whether each choice is within the capacity of its expert; earlier tokens of a sample
    come first.
    """
    rows, length, k, num_experts = is_chosen_MxLxkxE.shape
    # By the decimal that the config states: in floats the product could round over a whole number.
    factor = Fraction(repr(config.capacity_factor))
    capacities = np.asarray(
        [
            min(tokens * k, math.ceil(factor * tokens * k / num_experts))
            for tokens in range(length + 1)
        ],
        np.int32,
    )
    # The place of each choice among those of its expert in the row, from 1, and in its sample.
    in_order = is_chosen_MxLxkxE.reshape(rows, length * k, num_experts).astype(jnp.int32)
    places = (jnp.cumsum(in_order, axis=1) * in_order).sum(axis=2).reshape(rows, length, k)
    if samples.before_MxLxE is not None:
        places -= jnp.take_along_axis(samples.before_MxLxE, experts_MxLxk, axis=2)
    fits: jax.Array = places <= jnp.asarray(capacities)[samples.tokens_MxS][..., None]
    return fits


def _fingerprint(slots: Slots, experts_MxLxk: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Returns the sum of the hashes of sample, place, layer and chosen expert over the real tokens:
    uint32[4].
    """
    assert slots.hashes_MxL is not None, "the rows are hashed where there are experts"
    route = (
        experts_MxLxk.astype(jnp.uint32) * _EXPERT + jnp.asarray(layer).astype(jnp.uint32) * _LAYER
    )
    low = mixed(slots.hashes_MxL[..., None] ^ mixed(route + _LANES[0]))
    high = mixed(low ^ mixed(route + _LANES[1]))
    real = (slots.segments_MxL != 0).astype(jnp.uint32)[..., None]
    # By bytes, of which 32 bits hold the sum over 2^23 slots and choices of a row.
    in_row = [
        jnp.sum((lane >> np.uint32(8 * byte) & _BYTE) * real, axis=(1, 2), dtype=jnp.uint32)
        for lane in (low, high)
        for byte in range(4)
    ]
    # Carries from byte to byte; what the last one carries is beyond 64 bits.
    bytes_M, over = [], jnp.zeros_like(in_row[0])
    for total in in_row:
        total += over
        bytes_M.append(total & _BYTE)
        over = total >> np.uint32(8)
    lanes_M = [
        sum(
            (bytes_M[4 * lane + byte] << np.uint32(8 * byte) for byte in range(1, 4)),
            bytes_M[4 * lane],
        )
        for lane in range(2)
    ]
    return carry(jnp, limb_sums(jnp, jnp.stack(lanes_M, axis=1)))
