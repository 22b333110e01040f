"""Losses of preference pairs: the mean over the pairs of the global batch.

DPO: Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290), equation 7; its label smoothing is
Mitchell's conservative DPO (2023, https://ericmitchell.ai/cdpo.pdf). ORPO: Hong et al. 2024
(https://arxiv.org/abs/2403.07691), equations 6 and 7, with mean log-probabilities over an answer's
tokens.

Shapes: M pairs, L tokens of a prompt with an answer; a pair is a row of W = 2 L slots, chosen and
rejected.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from maxbatch.config.sections import PreferenceConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.kinds.pair.reference import AnswersReference
from maxbatch.kinds.pair.scored_answers import (
    ScoredAnswers,
    reference_of,
    score_answers,
    weigh_answers,
)
from maxbatch.model.decoder import Decoder
from maxbatch.update.gradients import Objective, ObjectiveSums
from maxbatch.update.packed_rows import on_one_shard

_LARGEST_MEAN = -1e-6  # of an answer's log-probabilities; the odds of a certain answer are infinite


def preference_objective(config: PreferenceConfig) -> Objective:
    """Returns a config's loss of pairs."""
    has_reference = config.dpo_algo == "dpo"

    def sums(decoder: Decoder, rows: Batch, batch_shards: int) -> ObjectiveSums:
        answers, routing = score_answers(decoder, rows, batch_shards, 2)
        losses_M, margins_M = pair_losses(
            answers, reference_of(rows, 2) if has_reference else None, config
        )
        weights_M = answers.weights_M
        totals = {"margin": margins_M, "pair_accuracy": (margins_M > 0).astype(jnp.float32)}
        others = {
            name: jax.lax.stop_gradient(jnp.sum(of_M * weights_M)) for name, of_M in totals.items()
        }
        totals_of_pass = ObjectiveSums(
            jnp.sum(losses_M * weights_M), jnp.sum(weights_M), others, routing
        )
        if rows.numbers is not None:  # all shards have all pairs of a pass
            loss, weight, others = jax.tree.map(on_one_shard, totals_of_pass[:3])
            totals_of_pass = ObjectiveSums(loss, weight, others, routing)
        return totals_of_pass

    others, weigh = ("margin", "pair_accuracy"), partial(weigh_answers, num_answers=2)
    reference = AnswersReference("pair", 2) if has_reference else None
    return Objective(sums, others, weigh, reference=reference, rows_per_sample=2)


def pair_losses(
    answers: ScoredAnswers, reference_Mx2: jax.Array | None, config: PreferenceConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the margin of each pair, float32[M].

    Args:
      reference_Mx2: float32, summed log-probabilities under the reference; unused by orpo.
    """
    if config.dpo_algo == "orpo":
        means_Mx2 = answers.logprobs_MxK / jnp.maximum(answers.tokens_MxK, 1.0)
        log_odds_Mx2 = means_Mx2 - _log_complement(means_Mx2)
        margins_M = log_odds_Mx2[:, 0] - log_odds_Mx2[:, 1]
        return -means_Mx2[:, 0] - config.orpo_lambda * jax.nn.log_sigmoid(margins_M), margins_M
    assert reference_Mx2 is not None, "the loss compares with the reference"
    ratios_Mx2 = answers.logprobs_MxK - reference_Mx2
    margins_M = config.dpo_beta * (ratios_Mx2[:, 0] - ratios_Mx2[:, 1])
    swapped = config.dpo_label_smoothing
    losses_M = -(1 - swapped) * jax.nn.log_sigmoid(margins_M) - swapped * jax.nn.log_sigmoid(
        -margins_M
    )
    return losses_M, margins_M


def _log_complement(logprobs: jax.Array) -> jax.Array:
    """Returns log(1 - exp(logprobs)), accurate for small probabilities and near 1."""
    logprobs = jnp.minimum(logprobs, _LARGEST_MEAN)
    is_likely = logprobs > -jnp.log(2.0)
    # Each branch needs a differentiable value even when unselected.
    likely, unlikely = jnp.where(is_likely, logprobs, -0.5), jnp.where(is_likely, -1.0, logprobs)
    array: jax.Array = jnp.where(
        is_likely, jnp.log(-jnp.expm1(likely)), jnp.log1p(-jnp.exp(unlikely))
    )
    return array
