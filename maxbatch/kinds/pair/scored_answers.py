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
from maxbatch.update.packed_rows import sums_by_number, sums_of_samples


class ScoredAnswers(NamedTuple):
    """The answers of each sample, such as a chosen and a rejected one."""

    logprobs_MxK: jax.Array  # float32, summed log-probabilities of the answer's tokens
    tokens_MxK: jax.Array  # float32, number of summed tokens

    @property
    def weights_M(self) -> jax.Array:
        """1 for a sample whose answers all have tokens; 0 for padding, or if the prompt fills the
        row.
        """
        return jnp.all(self.tokens_MxK > 0, axis=1).astype(jnp.float32)


class AnswerRows(NamedTuple):
    """A row for each answer with its prompt, [K M, L]."""

    tokens: jax.Array  # int32
    segments: jax.Array  # int32, 1, and 0 at padding
    weights: jax.Array  # float32, 1 at the tokens of the answer


def score_answers(
    decoder: Decoder, rows: Batch, batch_shards: int, num_answers: int
) -> tuple[ScoredAnswers, RoutingSums | None]:
    """Returns the answers of M samples, and the routing sums over their rows if the decoder has
    experts.

    Where samples share rows, M is the most samples that a pass may hold, and all shards of the data
    axis have all of them.
    """
    if rows.numbers is not None:
        x, routing = decoder.hidden(rows.tokens, rows.segments, rows.begins)
        scores = token_logprobs_of(decoder, x, rows.tokens, batch_shards=batch_shards)
        summed = (
            sums_of_samples(of_tokens, rows.numbers, num_answers)
            for of_tokens in (scores.logprobs_MxL * rows.weights, rows.weights)
        )
        return ScoredAnswers(*summed), routing
    of_answers = rows_of_answers(rows, num_answers)
    x, routing = decoder.hidden(of_answers.tokens, of_answers.segments)
    scores = token_logprobs_of(decoder, x, of_answers.tokens, batch_shards=batch_shards)
    return sum_by_answer(scores.logprobs_MxL, of_answers.weights, num_answers), routing


def rows_of_answers(rows: TokenRows, num_answers: int) -> AnswerRows:
    """Splits samples [M, W] into a row for each answer with its prompt, [K M, L]."""
    tokens, segments, weights = (
        _by_answer(x, num_answers) for x in (rows.tokens, rows.segments, rows.weights)
    )
    return AnswerRows(tokens, jnp.minimum(segments, 1), weights)


def sum_by_answer(logprobs: jax.Array, weights: jax.Array, num_answers: int) -> ScoredAnswers:
    """Sums the log-probabilities of the tokens of each answer, and counts them.

    Args:
      logprobs: of each token given those before it, float32[K M, L].
      weights: 1 at the tokens of the answer, else 0, float32[K M, L].
    """
    sums = (
        jnp.sum(of_tokens, axis=1).reshape(-1, num_answers)
        for of_tokens in (logprobs * weights, weights)
    )
    return ScoredAnswers(*sums)


def reference_of(rows: Batch, num_answers: int) -> jax.Array:
    """Returns the log-probabilities of the answers under the reference, float32[M, K]."""
    if rows.numbers is not None:
        return sums_of_samples(rows.reference, rows.numbers, num_answers)
    return jnp.sum(_by_answer(rows.reference, num_answers), axis=1).reshape(-1, num_answers)


def weigh_answers(rows: Batch, num_answers: int) -> jax.Array:
    """Returns the number of samples of a pass whose answers all have tokens."""
    if rows.numbers is not None:
        tokens_MxK = sums_by_number(rows.weights, rows.numbers, rows.weights.size, num_answers)
    else:
        tokens_MxK = jnp.sum(_by_answer(rows.weights, num_answers), axis=1).reshape(-1, num_answers)
    return jnp.sum(ScoredAnswers(tokens_MxK, tokens_MxK).weights_M)


def _by_answer(rows_MxW: jax.Array, num_answers: int) -> jax.Array:
    """Splits samples into answers, [K M, L]."""
    array: jax.Array = rows_MxW.reshape(num_answers * rows_MxW.shape[0], -1)
    return array
