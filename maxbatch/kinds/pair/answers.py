"""Answers of samples, one or several per sample, and their log-probabilities.

Shapes: M samples, K answers per sample, L tokens of a prompt with an answer; a sample is a row of W
= K L slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.data.feed.placement import Batch, TokenRows
from maxbatch.model.decoder import Decoder
from maxbatch.model.experts.routing import RoutingSums
from maxbatch.model.loss import token_logprobs_of


class Answers(NamedTuple):
    """The answers of each sample, such as a chosen and a rejected one."""

    logprobs_MxK: jax.Array  # float32, summed log-probabilities of the answer's tokens
    tokens_MxK: jax.Array  # float32, number of summed tokens

    @property
    def weights_M(self) -> jax.Array:
        """1 for a sample whose answers all have tokens; 0 for padding, or if the prompt fills the
        row.
        """
        return jnp.all(self.tokens_MxK > 0, axis=1).astype(jnp.float32)


def score_answers(
    decoder: Decoder, rows: TokenRows, batch_shards: int, num_answers: int
) -> tuple[Answers, RoutingSums | None]:
    """Returns the answers of M samples, and the routing sums over their rows if the decoder has
    experts.
    """
    tokens, segments, weights = (
        _by_answer(x, num_answers) for x in (rows.tokens, rows.segments, rows.weights)
    )
    x, routing = decoder.hidden(tokens, jnp.minimum(segments, 1))
    logprobs = token_logprobs_of(decoder, x, tokens, batch_shards=batch_shards).logprobs_MxL
    sums = (
        jnp.sum(of_tokens, axis=1).reshape(-1, num_answers)
        for of_tokens in (logprobs * weights, weights)
    )
    return Answers(*sums), routing


def reference_of(rows: Batch, num_answers: int) -> jax.Array:
    """Returns the log-probabilities of the answers under the reference, float32[M, K]."""
    return jnp.sum(_by_answer(rows.reference, num_answers), axis=1).reshape(-1, num_answers)


def weigh_answers(rows: TokenRows, num_answers: int) -> jax.Array:
    """Returns the number of samples whose answers all have tokens."""
    tokens_MxK = jnp.sum(_by_answer(rows.weights, num_answers), axis=1).reshape(-1, num_answers)
    return jnp.sum(Answers(tokens_MxK, tokens_MxK).weights_M)


def _by_answer(rows_MxW: jax.Array, num_answers: int) -> jax.Array:
    """Splits samples into answers, [K M, L]."""
    array: jax.Array = rows_MxW.reshape(num_answers * rows_MxW.shape[0], -1)
    return array
