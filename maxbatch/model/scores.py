"""The rules by which the scores of attention follow from queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.plan.program import Kernel


class ScoreRules(NamedTuple):
    """The rules by which scores follow from queries and keys."""

    scale: float | None = None  # of the products; None: 1 / sqrt(h)
    soft_cap: float = 0.0  # c > 0: scores s become c tanh(s / c)
    window: int = 0  # tokens that a local layer sees, its own included
    is_local: jax.Array | bool = False  # whether the layer is local; traced where a loop runs layers of both kinds
    implementation: Kernel = "dot_product"

    def in_window(self, distances: jax.Array) -> jax.Array:
        """Returns whether a layer that may be local sees tokens at these distances."""
        near = distances < self.window
        return near if isinstance(self.is_local, bool) else near | ~self.is_local


PLAIN = ScoreRules()


def soft_capped(scores: jax.Array, cap: float) -> jax.Array:
    """Returns c tanh(s / c), or the scores as they are if the cap c is 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores
