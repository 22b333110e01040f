"""The loss of reinforcement learning equals the papers', term by term."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.data.feed.passes import Passes, packed
from maxbatch.kinds.prompt.objective import Pairs, group_advantages, pair_losses

M, L = 6, 10


def some_pairs() -> tuple[np.ndarray, Pairs]:
    rng = np.random.default_rng(0)
    starts, ends = rng.integers(1, 4, M), rng.integers(5, L + 1, M)
    slots = np.arange(L)
    mask = ((slots >= starts[:, None]) & (slots < ends[:, None])).astype(np.float32)
    mask[-1] = 0  # a row that only fills the chunk
    old = rng.normal(-2, 1, (M, L)).astype(np.float32)
    new = old + rng.normal(0, 0.3, (M, L)).astype(np.float32)
    reference = new + rng.normal(0, 0.3, (M, L)).astype(np.float32)
    advantages = np.repeat(rng.normal(0, 1, (M, 1)), L, axis=1).astype(np.float32)
    tokens = np.zeros((M, L), np.int32)
    return new, Pairs(tokens, tokens, mask, old, reference, advantages)


def transcribed(new: jax.Array, pairs: Pairs, algo: str, mode: str, beta: float) -> jax.Array:
    """Equation 3 of DeepSeekMath, and 13 of GSPO, one response after the other."""
    losses, lengths = [], []
    for i in range(M):
        where = np.flatnonzero(pairs.weights[i])
        if not len(where):
            continue
        lp, old = new[i, where], pairs.old_logprobs_MxL[i, where]
        a = pairs.advantages_MxL[i, 0]
        if algo == "grpo":
            ratio = jnp.exp(lp - old)
        else:
            s = jnp.exp(jnp.sum(lp - old) / len(where))
            # pi_theta / sg(pi_theta) of the paper, which is 1 and carries the gradient.
            ratio = jax.lax.stop_gradient(s) * jnp.exp(lp - jax.lax.stop_gradient(lp))
        surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.28) * a)
        to_reference = pairs.reference_logprobs_MxL[i, where] - lp
        kl = jnp.exp(to_reference) - to_reference - 1
        losses.append(-jnp.sum(surrogate - beta * kl))
        lengths.append(len(where))
    if mode == "token-mean":
        return sum(losses) / sum(lengths)
    if mode == "sequence-mean":
        return sum(losses) / len(losses)
    return sum(loss / n for loss, n in zip(losses, lengths, strict=True)) / len(losses)


@pytest.mark.parametrize("algo", ["grpo", "gspo-token"])
@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "sequence-mean-token-mean"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_loss_and_gradient_are_those_of_the_paper(algo: str, mode: str, beta: float) -> None:
    new, pairs = some_pairs()
    config = load_config(
        overrides=[
            f"loss_algo={algo}",
            f"loss_agg_mode={mode}",
            f"grpo_beta={beta}",
            "grpo_epsilon=0.2",
            "epsilon_high=0.28",
        ]
    )

    def ours(new: jax.Array) -> jax.Array:
        loss, weight, _ = pair_losses(new, pairs, config.rl)
        return loss / weight

    loss, gradient = jax.jit(jax.value_and_grad(ours))(jnp.asarray(new))
    theirs = jax.jit(jax.value_and_grad(lambda new: transcribed(new, pairs, algo, mode, beta)))
    expected = theirs(jnp.asarray(new))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)


def test_an_advantage_is_the_distance_from_the_groups_mean_in_deviations() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5], np.float32)
    expected = (rewards[:4] - rewards[:4].mean()) / rewards[:4].std()
    np.testing.assert_allclose(group_advantages(rewards, 4), [*expected, 0, 0, 0, 0], rtol=1e-6)


def test_an_advantage_has_the_deviation_of_trl_or_none() -> None:
    rewards = np.array([1.0, 0.0, 0.25, 1.0, 0.5, 0.5, 0.5, 0.5], np.float32)
    difference = rewards[:4] - rewards[:4].mean()
    by_trl = difference / (rewards[:4].std(ddof=1) + 1e-4)
    for scale, expected in [("sample_deviation", by_trl), ("none", difference)]:
        found = group_advantages(rewards, 4, scale)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, [*expected, 0, 0, 0, 0], rtol=1e-6)


def test_clipping_and_divergence_are_counted_per_token() -> None:
    new, pairs = some_pairs()
    _, _, sums = pair_losses(jnp.asarray(new), pairs, load_config(overrides=["grpo_beta=0.1"]).rl)
    ratio = np.exp(new - pairs.old_logprobs_MxL)
    a = pairs.advantages_MxL
    clipped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    assert sums["tokens"] == pairs.weights.sum()
    assert sums["clip_fraction"] == (clipped * pairs.weights).sum() > 0
    to_reference = pairs.reference_logprobs_MxL - new
    kl = (np.exp(to_reference) - to_reference - 1) * pairs.weights
    assert float(sums["kl"]) == pytest.approx(float(kl.sum()), rel=1e-5)


@pytest.mark.parametrize("algo", ["grpo", "gspo-token"])
@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "sequence-mean-token-mean"])
def test_pairs_that_share_rows_have_the_loss_and_gradient_of_a_row_a_pair(
    algo: str, mode: str
) -> None:
    new, pairs = some_pairs()
    keys = [f"loss_algo={algo}", f"loss_agg_mode={mode}", "grpo_beta=0.5"]
    config = load_config("rl", keys).rl
    lengths = np.array([np.flatnonzero(row)[-1] + 1 if row.any() else 0 for row in pairs.weights])
    lengths = np.minimum(lengths, [5, 10, 5, 4, 10, 0])
    is_token = np.arange(L) < lengths[:, None]
    rows = {name: np.where(is_token, x, 0) for name, x in pairs._asdict().items() if x is not None}
    rows |= {"segments": is_token.astype(np.int32), "new": np.where(is_token, new, 0)}
    shared = packed(rows, Passes.of(lengths, L, 2))
    assert len(shared["tokens"]) < np.count_nonzero(lengths)

    def loss(rows: dict[str, np.ndarray]) -> tuple[float, ...]:
        given = Pairs(**{name: x for name, x in rows.items() if name != "new"})
        (total, (weight, others)), gradient = jax.value_and_grad(
            lambda x: (lambda sums: (sums[0], sums[1:]))(pair_losses(x, given, config)),
            has_aux=True,
        )(jnp.asarray(rows["new"]))
        return total, weight, *others.values(), jnp.sum(gradient**2), jnp.sum(gradient**3)

    np.testing.assert_allclose(loss(shared), loss(rows), rtol=2e-6, atol=1e-7)
