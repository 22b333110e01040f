"""The loss of every token of some samples, as a page shows it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from maxbatch.around.replay.task import Measuring
from maxbatch.data.stream.rows import RowArrays
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.update.lora import adapters_of
from maxbatch.update.model_on_mesh import ModelOnMesh
from maxbatch.update.state import TrainState

Score = Callable[[TrainState, np.ndarray, np.ndarray], jax.Array]
_MOST_BYTES = 4  # of a character that several tokens make


def token_losses(measuring: Measuring, state: TrainState, rows: RowArrays) -> np.ndarray:
    """Returns the cross-entropy of each token of some samples, float32[n, W]; NaN where a token has
    no weight.

    Args:
      rows: the samples, arrays [n, W], n > 0; of pairs both answers, one after the other.
    """
    score, shards = _score(measuring)
    size = measuring.length
    tokens, segments = (rows[name].reshape(-1, size) for name in ("tokens", "segments"))
    count = len(tokens)
    padding = ((0, -count % shards), (0, 0))
    tokens, segments = (np.pad(array, padding) for array in (tokens, segments))
    logprobs = [
        np.asarray(score(state, tokens[i : i + shards], segments[i : i + shards]))
        for i in range(0, len(tokens), shards)
    ]
    losses = -np.concatenate(logprobs)[:count].reshape(rows["tokens"].shape)
    return np.where(rows["weights"] > 0, losses, np.nan)


@functools.lru_cache(maxsize=1)
def _score(measuring: Measuring) -> tuple[Score, int]:
    """Returns the compiled log-probabilities of rows, and the rows that they take at a time."""
    keys = measuring.keys
    model = ModelOnMesh(keys, keys.mesh, measuring.mesh, BATCH_AXES)
    adapters = adapters_of(keys.adapters, keys.quantization)

    def logprobs(state: TrainState, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        params: State = state.params
        if adapters is not None and state.frozen is not None:
            params = adapters.merged(state.frozen, state.params)
        return model.token_logprobs(params, tokens, segments)

    return jax.jit(logprobs), model.row_shards


def pieces_of_text(
    decode: Callable[[np.ndarray], str], ids: np.ndarray, losses: np.ndarray
) -> list[tuple[str, float | None]]:
    """Returns the texts of tokens, each with its loss; tokens that make one character are one
    piece, with the largest of their losses.
    """
    pieces, begin = list[tuple[str, float | None]](), 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        if text.endswith("\ufffd") and end - begin < _MOST_BYTES and end < len(ids):
            continue
        known = losses[begin:end][~np.isnan(losses[begin:end])]
        pieces.append((text, float(known.max()) if len(known) else None))
        begin = end
    return pieces
