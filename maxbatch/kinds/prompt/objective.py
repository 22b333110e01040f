"""Group-relative policy optimisation as an objective of the same update as pre-training.

GRPO: Shao et al. 2024, DeepSeekMath (https://arxiv.org/abs/2402.03300), equations 3 and 4;
`epsilon_high` is DAPO's (Yu et al. 2025, https://arxiv.org/abs/2503.14476). gspo-token: Zheng et
al. 2025 (https://arxiv.org/abs/2507.18071), equations 13 and 14.

Shapes: M pairs of a chunk, L tokens of prompt and response, B pairs of a batch, G responses to a
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.sections import RLConfig
from maxbatch.data.stream.rows import RowArrays
from maxbatch.model.decoder import Decoder
from maxbatch.model.loss import token_logprobs_of
from maxbatch.model.packed_samples import PackedSamples
from maxbatch.update.gradients import Objective, ObjectiveSums


class Pairs(NamedTuple):
    """A chunk of prompt-response pairs, as rows to train on."""

    tokens: jax.Array  # int32: prompt, response, padding
    segments: jax.Array  # int32: 1 where there is a token, 0 at padding
    weights: jax.Array  # float32: 1 at the tokens of the response, else 0
    old_logprobs_MxL: jax.Array  # float32: log-probability of each token at sampling
    # float32: under the reference parameters; unused if `grpo_beta` is 0
    reference_logprobs_MxL: jax.Array
    advantages_MxL: jax.Array  # float32: the response's advantage, at each of its tokens
    # int32: 1 + the token that pads a pair's own row at the pair's first token, else 0; None: a row
    # a pair
    begins: jax.Array | None = None


def pair_rows(
    tokens_MxL: np.ndarray,
    mask_MxL: np.ndarray,
    logprobs_MxL: np.ndarray,
    lengths_M: np.ndarray,
    advantages_M: np.ndarray,
) -> RowArrays:
    """Returns the arrays of `Pairs` but for the reference, a row a pair.

    Args:
      tokens_MxL: int32: prompt, response, padding.
      mask_MxL: bool: where the response is; all False in padding rows.
      logprobs_MxL: float32, of the tokens at sampling.
      lengths_M: int32, tokens of prompt and response.
      advantages_M: float32.
    """
    return {
        "tokens": tokens_MxL,
        "segments": (np.arange(tokens_MxL.shape[1]) < lengths_M[:, None]).astype(np.int32),
        "weights": mask_MxL.astype(np.float32),
        "old_logprobs_MxL": logprobs_MxL,
        "advantages_MxL": np.where(mask_MxL, advantages_M[:, None], np.float32(0)),
    }


AdvantageScale = Literal["deviation", "sample_deviation", "none"]
_LEAST_DEVIATION = 1e-4  # TRL's
# Sums over the responses' tokens, besides the loss, by metric; "kl" only with `grpo_beta`.
SUMS = ("tokens", "entropy", "clip_fraction", "old_policy_kl")


def group_advantages(
    rewards_B: np.ndarray, num_generations: int, scale: AdvantageScale = "deviation"
) -> np.ndarray:
    """Returns each response's advantage within its prompt's group: (r - mean) / standard deviation.

    Args:
      rewards_B: float[B], with the responses to a prompt adjacent.
      num_generations: G.
      scale: deviation: over G; sample_deviation: over G - 1, plus `_LEAST_DEVIATION`; none: r - mean
        is not divided (Liu et al. 2025, Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Returns:
      float32[B]; 0 if all responses to a prompt have the same reward.
    """
    rewards_PxG = np.asarray(rewards_B, np.float64).reshape(-1, num_generations)
    differences_PxG = rewards_PxG - rewards_PxG.mean(axis=1, keepdims=True)
    deviations_Px1 = rewards_PxG.std(axis=1, keepdims=True)
    divisors_Px1 = np.ones_like(deviations_Px1)
    if scale == "deviation":
        divisors_Px1 = deviations_Px1
    elif scale == "sample_deviation":
        unbiased = math.sqrt(num_generations / max(1, num_generations - 1))
        divisors_Px1 = deviations_Px1 * unbiased + _LEAST_DEVIATION
    scaled_PxG = np.divide(
        differences_PxG,
        divisors_Px1,
        out=np.zeros_like(differences_PxG),
        where=deviations_Px1 > 1e-9,
    )
    array: np.ndarray = scaled_PxG.reshape(-1).astype(np.float32)
    return array


def pair_losses(
    logprobs_MxL: jax.Array, pairs: Pairs, config: RLConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns a chunk's loss, weight and other figures, all as sums.

    Args:
      logprobs_MxL: float32, of each token under the trained parameters.

    Returns:
      (loss_sum, weight_sum, `SUMS` by name), float32 scalars. The weighted mean is over all tokens
      (token-mean), over the responses' sums (sequence-mean) or over the responses' means
      (sequence-mean-token-mean).
    """
    mask_MxL = pairs.weights
    summed = _sums_by_response(pairs)
    lengths_MxK = summed(mask_MxL)
    log_ratio_MxL = (logprobs_MxL - pairs.old_logprobs_MxL) * mask_MxL
    if config.loss_algo == "gspo-token":
        mean_MxK = summed(log_ratio_MxL) / jnp.maximum(lengths_MxK, 1.0)
        ratio_MxL = jnp.exp(
            jax.lax.stop_gradient(mean_MxK) + logprobs_MxL - jax.lax.stop_gradient(logprobs_MxL)
        )
    else:
        ratio_MxL = jnp.exp(log_ratio_MxL)
    low = 1 - config.grpo_epsilon
    high = 1 + (config.grpo_epsilon if config.epsilon_high is None else config.epsilon_high)
    gain_MxL = ratio_MxL * pairs.advantages_MxL
    clipped_gain_MxL = jnp.clip(ratio_MxL, low, high) * pairs.advantages_MxL
    losses_MxL = -jnp.minimum(gain_MxL, clipped_gain_MxL)
    kl = {}
    if config.grpo_beta:
        # Schulman's unbiased, non-negative estimator of the divergence:
        # http://joschu.net/blog/kl-approx.html
        to_reference_MxL = pairs.reference_logprobs_MxL - logprobs_MxL
        kl_MxL = jnp.exp(to_reference_MxL) - to_reference_MxL - 1
        losses_MxL = losses_MxL + config.grpo_beta * kl_MxL
        kl = {"kl": jnp.sum(kl_MxL * mask_MxL)}
    losses_MxL = losses_MxL * mask_MxL
    is_response_MxK = (lengths_MxK > 0).astype(jnp.float32)
    if pairs.begins is not None:  # counted at its first token
        is_response_MxK *= (pairs.begins > 0).astype(jnp.float32)
    if config.loss_agg_mode == "token-mean":
        loss, weight = jnp.sum(losses_MxL), jnp.sum(mask_MxL)
    elif config.loss_agg_mode == "sequence-mean":
        loss, weight = jnp.sum(losses_MxL), jnp.sum(is_response_MxK)
    else:
        loss, weight = jnp.sum(losses_MxL / jnp.maximum(lengths_MxK, 1.0)), jnp.sum(is_response_MxK)
    sums = {
        "tokens": jnp.sum(mask_MxL),
        **kl,
        "clip_fraction": jnp.sum((clipped_gain_MxL < gain_MxL).astype(jnp.float32) * mask_MxL),
        "old_policy_kl": jnp.sum((jnp.exp(log_ratio_MxL) - 1 - log_ratio_MxL) * mask_MxL),
    }
    return loss, weight, sums


def _sums_by_response(pairs: Pairs) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that sums figures of tokens [M, L] over each response.

    It returns [M, K], K = 1 for a row a pair; where pairs share rows K = L, and a slot has the sum of
    its own pair.
    """
    if pairs.begins is None:
        return lambda x_MxL: jnp.sum(x_MxL, axis=1, keepdims=True)
    first_MxL = PackedSamples.of(pairs.segments, pairs.begins).first_MxL

    def in_row(x_L: jax.Array, first_L: jax.Array) -> jax.Array:
        sums_L = jnp.zeros_like(x_L).at[first_L].add(x_L)
        return sums_L[first_L]

    return lambda x_MxL: jax.vmap(in_row)(x_MxL, first_MxL)


def policy_objective(config: RLConfig) -> Objective:
    """Returns the objective of `maxbatch rl`, over rows of `Pairs`."""

    def sums(decoder: Decoder, pairs: Pairs, batch_shards: int) -> ObjectiveSums:
        x_MxLxD, routing = decoder.hidden(pairs.tokens, pairs.segments, pairs.begins)
        scores = token_logprobs_of(decoder, x_MxLxD, pairs.tokens, batch_shards=batch_shards)
        loss, weight, others = pair_losses(scores.logprobs_MxL, pairs, config)
        entropy = jnp.sum(jax.lax.stop_gradient(scores.entropies_MxL) * pairs.weights)
        return ObjectiveSums(loss, weight, {**others, "entropy": entropy}, routing)

    return Objective(sums, (*SUMS, "kl") if config.grpo_beta else SUMS)
