"""The rules by which the scores of attention follow from queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.config.sections import ContextStrategy
from maxbatch.families.forms.attention import GROWTH_FACTOR, GROWTH_TOKENS
from maxbatch.plan.program import Kernel


class ScoreRules(NamedTuple):
    """The rules by which scores follow from queries and keys."""

    scale: float | None = None  # of the products; None: 1 / sqrt(h)
    soft_cap: float = 0.0  # c > 0: scores s become c tanh(s / c)
    window: int = 0  # tokens that a local layer sees at most, its own included
    # whether the layer is local; traced where a loop runs layers of both kinds
    is_local: jax.Array | bool = False
    implementation: Kernel = "dot_product"
    strategy: ContextStrategy = "all_gather"  # of rows that the context axis splits
    is_balanced: bool = False  # whether a ring deals rows out in balance

    def in_window(self, distances: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns whether a layer that may be local sees tokens at these distances.

        Args:
          positions: of the tokens that look, in their documents; None: they are in `seen_by`.
        """
        near = self.near(distances, positions)
        return near if isinstance(self.is_local, bool) else near | ~self.is_local

    def near(self, distances: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Returns whether tokens at these distances are in the window; see `in_window`."""
        del positions
        return distances < self.window

    def seen_by(self, segments_MxL: jax.Array) -> jax.Array:
        """Returns the segments of which a token sees its own alone, int32[M, L]."""
        return segments_MxL


def growth_at(places_MxL: jax.Array) -> jax.Array:
    """Returns the factors of scores in layers without RoPE, float32[M, L], from tokens' places in
    their documents.

    Reference: Nakanishi 2025 (https://arxiv.org/abs/2501.19399), as Llama 4 has it.
    """
    steps = jnp.floor((places_MxL.astype(jnp.float32) + 1.0) / GROWTH_TOKENS)
    return jnp.log1p(steps) * GROWTH_FACTOR + 1.0


PLAIN = ScoreRules()


def soft_capped(scores: jax.Array, cap: float) -> jax.Array:
    """Returns c tanh(s / c), or the scores as they are if the cap c is 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores
