"""The losses of preference pairs against transcriptions of their papers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.config.sections import PreferenceConfig
from maxbatch.data.feed.placement import Batch
from maxbatch.kinds.pair.objective import pair_losses
from maxbatch.kinds.pair.scored_answers import ScoredAnswers, score_answers
from maxbatch.model.decoder import Decoder
from tests.helpers.tiny import LENGTH, tiny_config

M = 6
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(1, 9, (M, 2)).astype(np.float64)
LOGPROBS = -RANDOM.uniform(0.01, 3, (M, 2)) * TOKENS
REFERENCE = LOGPROBS + RANDOM.normal(0, 2, (M, 2))


def config(**changed: object) -> PreferenceConfig:
    defaults = {"dpo_algo": "dpo", "dpo_beta": 0.1, "dpo_label_smoothing": 0.0, "orpo_lambda": 0.1}
    return PreferenceConfig.of(defaults | changed)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def dpo(logprobs: np.ndarray, beta: float, swapped: float) -> tuple[np.ndarray, np.ndarray]:
    """Equation 7 of arXiv 2305.18290, and its gradient below that; with the labels of cDPO,
    equation 3.
    """
    (policy_w, policy_l), (reference_w, reference_l) = logprobs.T, REFERENCE.T
    reward_w, reward_l = beta * (policy_w - reference_w), beta * (policy_l - reference_l)
    losses = -(1 - swapped) * np.log(sigmoid(reward_w - reward_l)) - swapped * np.log(
        sigmoid(reward_l - reward_w)
    )
    slope = -beta * (
        (1 - swapped) * sigmoid(reward_l - reward_w) - swapped * sigmoid(reward_w - reward_l)
    )
    return losses, np.stack([slope, -slope], axis=1)


def orpo(logprobs: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Equations 3 to 7 of arXiv 2403.07691, and the gradient of its section 4.3."""
    p_w, p_l = np.exp(logprobs / TOKENS).T
    odds_w, odds_l = p_w / (1 - p_w), p_l / (1 - p_l)
    ratio = odds_w / odds_l
    losses = -np.log(p_w) + weight * -np.log(sigmoid(np.log(ratio)))
    delta = 1 / (1 + ratio)
    slopes = np.stack([-1 - weight * delta / (1 - p_w), weight * delta / (1 - p_l)], axis=1)
    return losses, slopes / TOKENS


@pytest.mark.parametrize("algorithm", ["dpo", "cdpo", "orpo"])
def test_losses_and_gradients_are_those_of_the_papers(algorithm: str) -> None:
    if algorithm == "orpo":
        own, (losses, slopes) = config(dpo_algo="orpo", orpo_lambda=0.25), orpo(LOGPROBS, 0.25)
    else:
        swapped = 0.2 if algorithm == "cdpo" else 0.0
        own, (losses, slopes) = (
            config(dpo_beta=0.3, dpo_label_smoothing=swapped),
            dpo(LOGPROBS, 0.3, swapped),
        )

    def total(logprobs_MxK: jax.Array) -> tuple[jax.Array, jax.Array]:
        answers = ScoredAnswers(logprobs_MxK, np.asarray(TOKENS, np.float32))
        found_M, _ = pair_losses(answers, np.asarray(REFERENCE, np.float32), own)
        return jnp.sum(found_M), found_M

    gradient, found = jax.jit(jax.grad(total, has_aux=True))(np.asarray(LOGPROBS, np.float32))
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-4)


def test_a_certain_answer_and_padding_have_finite_odds() -> None:
    def total(logprobs_MxK: jax.Array) -> jax.Array:
        answers = ScoredAnswers(logprobs_MxK, np.array([[3, 2], [0, 0]], np.float32))
        return jnp.sum(pair_losses(answers, None, config(dpo_algo="orpo"))[0] * answers.weights_M)

    loss, gradient = jax.device_get(
        jax.jit(jax.value_and_grad(total))(np.array([[0, -200], [0, 0]], np.float32))
    )
    assert np.isfinite(loss) and np.isfinite(gradient).all() and (gradient[1] == 0).all()


def test_an_answer_counts_its_own_tokens_after_the_prompt_and_no_others() -> None:
    prompt, chosen, rejected = [5, 6, 7], [8, 9], [10, 11, 12, 13]
    rows = {name: np.zeros((2, 2 * LENGTH), np.int32) for name in ("tokens", "segments", "weights")}
    for begin, number, answer in ((0, 1, chosen), (LENGTH, 2, rejected)):
        end = begin + len(prompt + answer)
        rows["tokens"][0, begin:end], rows["segments"][0, begin:end] = prompt + answer, number
        rows["weights"][0, begin + len(prompt) : end] = 1
    # the second pair is padding
    batch = Batch(rows["tokens"], rows["segments"], rows["weights"].astype(np.float32))

    def both(batch: Batch) -> tuple[ScoredAnswers, list[jax.Array]]:
        decoder = Decoder(tiny_config("base_num_decoder_layers=1").decoder, rngs=nnx.Rngs(0))
        alone = []
        for answer in (chosen, rejected):
            tokens_1xT = jnp.array([prompt + answer])
            x_1xTxD = decoder.hidden(tokens_1xT, jnp.ones_like(tokens_1xT)).x_MxLxD
            logprobs_TxV = jax.nn.log_softmax(decoder.logits(x_1xTxD)[0])
            alone.append(
                sum(logprobs_TxV[len(prompt) - 1 + i, token] for i, token in enumerate(answer))
            )
        return score_answers(decoder, batch, 1, 2)[0], alone

    answers, alone = jax.device_get(jax.jit(both)(batch))
    np.testing.assert_allclose(answers.logprobs_MxK[0], alone, rtol=1e-5)
    assert answers.tokens_MxK.tolist() == [[2, 4], [0, 0]] and answers.weights_M.tolist() == [1, 0]
