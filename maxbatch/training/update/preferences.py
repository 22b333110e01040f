"""Losses of preference pairs: the mean over the pairs of the global batch.

DPO: Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290), equation 7; its label smoothing is Mitchell's conservative
DPO (2023, https://ericmitchell.ai/cdpo.pdf). ORPO: Hong et al. 2024 (https://arxiv.org/abs/2403.07691), equations 6 and
7, with log-probabilities that are means over an answer's tokens.

Shapes: M pairs, L tokens of a prompt with an answer; a pair is a row of W = 2 L slots, chosen and rejected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.config.sections import PreferenceConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.model.decoder import Decoder
from maxbatch.model.experts.routing import RoutingSums
from maxbatch.model.loss import token_logprobs_of
from maxbatch.training.update.gradients import NEXT_TOKEN, Objective, ObjectiveSums

SUMS = ("margin", "pair_accuracy")  # over the pairs, besides the loss, by the names of the metrics
_LARGEST_MEAN = -1e-6  # of the log-probabilities of an answer: the odds of a certain one are infinite


class LossConfig(PreferenceConfig):
    """The keys that choose the loss of a run."""

    use_dpo: bool

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the first parameters."""
        return self.use_dpo and self.dpo_algo == "dpo"


class Answers(NamedTuple):
    """The two answers of each pair, chosen and rejected."""

    logprobs_Mx2: jax.Array  # float32, sum of the log-probabilities of the answer's tokens
    tokens_Mx2: jax.Array  # float32, tokens that are summed

    @property
    def weights_M(self) -> jax.Array:
        """1 for a pair of which both answers have tokens; 0 for padding, and where the prompt fills the row."""
        return jnp.all(self.tokens_Mx2 > 0, axis=1).astype(jnp.float32)


def objective_of_config(config: LossConfig) -> Objective:
    """Returns the loss that a config states: of pairs with `use_dpo`, else next-token prediction."""
    if not config.use_dpo:
        return NEXT_TOKEN

    def sums(decoder: Decoder, rows: Batch, batch_shards: int) -> ObjectiveSums:
        answers, routing = score_answers(decoder, rows, batch_shards)
        reference_Mx2 = None
        if config.has_reference:
            reference_Mx2 = jnp.sum(_halves(rows.reference_AxMxL), axis=1).reshape(-1, 2)
        losses_M, margins_M = pair_losses(answers, reference_Mx2, config)
        weights_M = answers.weights_M
        totals = {"margin": margins_M, "pair_accuracy": (margins_M > 0).astype(jnp.float32)}
        others = {name: jax.lax.stop_gradient(jnp.sum(of_M * weights_M)) for name, of_M in totals.items()}
        return ObjectiveSums(jnp.sum(losses_M * weights_M), jnp.sum(weights_M), others, routing)

    return Objective(sums, SUMS, weigh=_count_pairs)


def score_answers(decoder: Decoder, rows: Batch, batch_shards: int) -> tuple[Answers, RoutingSums | None]:
    """Returns the answers of M pairs, and the sums of the decoder's experts over both rows of each, if it has any."""
    tokens, segments, weights = map(_halves, rows[:3])
    x, routing = decoder.hidden(tokens, jnp.minimum(segments, 1))
    logprobs = token_logprobs_of(decoder, x, tokens, batch_shards=batch_shards).logprobs_MxL
    sums = (jnp.sum(of_tokens, axis=1).reshape(-1, 2) for of_tokens in (logprobs * weights, weights))
    return Answers(*sums), routing


def _halves(rows_MxW: jax.Array) -> jax.Array:
    """Returns the rows of the chosen and of the rejected answers in turn, [2 M, L]."""
    array: jax.Array = rows_MxW.reshape(2 * rows_MxW.shape[0], -1)
    return array


def _count_pairs(rows: Any) -> jax.Array:
    tokens_Mx2 = jnp.sum(_halves(rows[2]), axis=1).reshape(-1, 2)
    return jnp.sum(Answers(tokens_Mx2, tokens_Mx2).weights_M)


def pair_losses(
    answers: Answers, reference_Mx2: jax.Array | None, config: PreferenceConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the margin of each pair, float32[M].

    Args:
      answers: under the parameters that are trained.
      reference_Mx2: float32, sums of log-probabilities under the reference; not read by orpo.
      config: the form of the loss.
    """
    if config.dpo_algo == "orpo":
        means_Mx2 = answers.logprobs_Mx2 / jnp.maximum(answers.tokens_Mx2, 1.0)
        log_odds_Mx2 = means_Mx2 - _log_complement(means_Mx2)
        margins_M = log_odds_Mx2[:, 0] - log_odds_Mx2[:, 1]
        return -means_Mx2[:, 0] - config.orpo_lambda * jax.nn.log_sigmoid(margins_M), margins_M
    assert reference_Mx2 is not None, "the loss compares with the reference"
    ratios_Mx2 = answers.logprobs_Mx2 - reference_Mx2
    margins_M = config.dpo_beta * (ratios_Mx2[:, 0] - ratios_Mx2[:, 1])
    swapped = config.dpo_label_smoothing
    losses_M = -(1 - swapped) * jax.nn.log_sigmoid(margins_M) - swapped * jax.nn.log_sigmoid(-margins_M)
    return losses_M, margins_M


def _log_complement(logprobs: jax.Array) -> jax.Array:
    """Returns log(1 - exp(logprobs)), by the form that is exact where the probability is small, or near 1."""
    logprobs = jnp.minimum(logprobs, _LARGEST_MEAN)
    is_likely = logprobs > -jnp.log(2.0)
    # Each branch gets a value that it can differentiate where the other one is taken.
    likely, unlikely = jnp.where(is_likely, logprobs, -0.5), jnp.where(is_likely, -1.0, logprobs)
    array: jax.Array = jnp.where(is_likely, jnp.log(-jnp.expm1(likely)), jnp.log1p(-jnp.exp(unlikely)))
    return array
