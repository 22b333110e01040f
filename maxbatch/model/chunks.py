"""The chunks of documents, of which a token of a local layer sees its own alone.

Shapes: M micro-batch, L length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxbatch.model.scores import ScoreRules
from maxbatch.model.segments import places_in_segments


class ChunkedScores(ScoreRules):
    """Rules of scores whose window is a chunk of the document, in a local layer."""

    def near(self, distances: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Returns whether tokens at these distances are in the chunk of the token that looks."""
        if positions is None:  # segments tell chunks apart
            return super().near(distances, positions)
        return distances <= positions % self.window

    def seen_by(self, segments_MxL: jax.Array) -> jax.Array:
        """Returns the chunks of a local layer, in place of the segments."""
        if self.is_local is not True:
            return segments_MxL
        return chunks_of_segments(segments_MxL, self.window)


def chunks_of_segments(segments_MxL: jax.Array, chunk: int) -> jax.Array:
    """Returns a number for each chunk of each document: int32[M, L]; a document's chunks count from
    its first token.
    """
    is_first_MxL = places_in_segments(segments_MxL) % chunk == 0
    return jnp.cumsum(is_first_MxL.astype(jnp.int32), axis=1)
