"""The rules by which the scores of attention follow from queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.plan.program import Kernel


class Scores(NamedTuple):
    """The rules by which scores follow from queries and keys."""

    scale: float | None = None  # of the products; None: 1 / sqrt(h)
    soft_cap: float = 0.0  # c > 0: scores s become c tanh(s / c)
    window: int = 0  # tokens that a local layer sees, its own included
    is_local: jax.Array | bool = False  # whether the layer is local; traced where a loop runs layers of both kinds
    implementation: Kernel = "dot_product"

    def capped(self, scores: jax.Array) -> jax.Array:
        """Returns the scores under the cap."""
        return self.soft_cap * jnp.tanh(scores / self.soft_cap) if self.soft_cap else scores

    def in_window(self, distances: jax.Array) -> jax.Array:
        """Returns whether a layer that may be local sees a token so many places back."""
        near = distances < self.window
        return near if isinstance(self.is_local, bool) else near | ~self.is_local


PLAIN = Scores()
