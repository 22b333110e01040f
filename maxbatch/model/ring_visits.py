"""A visit in a ring: queries of one device see keys of another.

Shapes: M micro-batch, H query heads, K key and value heads, p tokens of a part of a device's share,
h head_dim, v width of a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from maxbatch.model.scores import ScoreRules

T = TypeVar("T")
HIDDEN = -1e30  # the score of a token that is not seen, and the log of a sum over no tokens


class Queries(NamedTuple):
    """The queries of a part."""

    q_MxHxpxh: jax.Array
    segments_Mxp: jax.Array


class Keys(NamedTuple):
    """The keys and values of a part, which go around the ring."""

    k_MxKxpxh: jax.Array
    v_MxKxpxv: jax.Array
    segments_Mxp: jax.Array


class Seen(NamedTuple):
    """The softmaxes of queries over some keys, in float32."""

    values_MxHxpxv: jax.Array  # the mean of the values by their weights
    log_sums_MxHxp: jax.Array  # of the exponentials of the scores

    def joined(self, more: Seen) -> Seen:
        """Returns the softmaxes over both sets of keys."""
        log_sums = jnp.logaddexp(self.log_sums_MxHxp, more.log_sums_MxHxp)
        here, there = (
            jnp.exp(seen.log_sums_MxHxp - log_sums)[..., None] * seen.values_MxHxpxv
            for seen in (self, more)
        )
        return Seen(here + there, log_sums)


class Known(NamedTuple):
    """The terms of the backward pass that queries have before they see keys."""

    log_sums_MxHxp: jax.Array  # of the exponentials of all scores, float32
    slopes_MxHxpxv: jax.Array  # the gradients of what they read
    means_MxHxp: jax.Array  # of the gradients of weights, by these weights, float32


class Gradients(NamedTuple):
    """The gradients that come of one visit."""

    q_MxHxpxh: jax.Array
    k_MxKxpxh: jax.Array
    v_MxKxpxv: jax.Array


@dataclasses.dataclass(frozen=True)
class Place:
    """The places in the row of a part of queries and a part of keys, the same one or an earlier
    one.
    """

    query: jax.Array  # of the first query
    key: jax.Array  # of the first key
    tokens: int  # of each part
    is_same: bool
    is_local: (
        jax.Array | bool
    )  # whether the layer is; traced where a loop runs layers of both kinds

    @property
    def distance(self) -> jax.Array:
        """The parts between the two."""
        return (self.query - self.key) // self.tokens

    def if_near(self, rules: ScoreRules, step: Callable[[T], T], state: T) -> T:
        """Returns the state after a step, or as it is if the keys are out of a local layer's
        window.
        """
        if self.is_same or self.is_local is False:
            return step(state)
        near = rules.near(self.query - self.key - self.tokens + 1, None)
        if self.is_local is not True:
            near |= ~self.is_local
        after: T = jax.lax.cond(near, step, lambda state: state, state)
        return after


class Visits(Protocol):
    """The computation of a visit; scores are scaled already."""

    def seen(self, queries: Queries, keys: Keys, place: Place) -> Seen:
        """Returns the softmaxes of the queries over these keys. Queries that see none of them have
        `HIDDEN` sums and any finite values.
        """

    def gradients(self, queries: Queries, keys: Keys, known: Known, place: Place) -> Gradients:
        """Returns the gradients that come of these queries and keys."""
