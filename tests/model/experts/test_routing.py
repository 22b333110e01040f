"""Routing of tokens, effects of padding and capacities, and the layer of experts against a loop
over them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.feed.passes import Passes, packed
from maxbatch.model.experts.experts import Experts
from maxbatch.model.experts.routing import choose, routed_slots
from maxbatch.model.segments import Slots
from maxbatch.parallel.sharding import unconstrained
from tests.helpers.configs import config_of

ROWS, LENGTH, WIDTH, NUM_EXPERTS, CHOICES = 3, 12, 16, 5, 2
BLOCK = ("decoder_block=qwen3_moe", f"num_experts={NUM_EXPERTS}", f"num_experts_per_tok={CHOICES}")
SIZES = (f"base_emb_dim={WIDTH}", "base_moe_mlp_dim=24")


def experts_of(*overrides: str) -> Experts:
    config = config_of(*BLOCK, *SIZES, *overrides).model
    return Experts(config, "layers.experts", rngs=nnx.Rngs(params=0), constrain=unconstrained)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    """Rows of states, float32[ROWS, LENGTH, WIDTH]."""
    return jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))


@pytest.fixture(scope="module")
def slots() -> Slots:
    """Rows of 12, 7 and 0 real tokens."""
    tokens = jnp.arange(ROWS * LENGTH, dtype=jnp.int32).reshape(ROWS, LENGTH)
    segments = (jnp.arange(LENGTH)[None] < jnp.asarray([12, 7, 0])[:, None]).astype(jnp.int32)
    return routed_slots(tokens, segments)


def looped(
    experts: Experts, x_MxLxD: jax.Array, segments_MxL: jax.Array, normalises: bool
) -> np.ndarray:
    """Returns the output by a loop over tokens and experts."""
    gate, up, down = (
        np.asarray(getattr(experts, f"expert_{name}")[...]) for name in ("gate", "up", "down")
    )
    out = np.zeros(x_MxLxD.shape, np.float32)
    for row, place in np.argwhere(np.asarray(segments_MxL)):
        x_D = np.asarray(x_MxLxD[row, place])
        scores_E = np.asarray(jax.nn.softmax(x_D @ np.asarray(experts.router[...])))
        chosen = np.argsort(-scores_E, kind="stable")[:CHOICES]
        total = scores_E[chosen].sum() if normalises else 1.0
        for e in chosen:
            inner_F = np.asarray(jax.nn.silu(x_D @ gate[e])) * (x_D @ up[e])
            out[row, place] += scores_E[e] / total * (inner_F @ down[e])
    return out


@pytest.mark.parametrize("normalises", [True, False])
def test_a_layer_of_experts_is_a_loop_over_them_and_padding_goes_to_none(x, slots, normalises):
    experts = experts_of(f"norm_topk_prob={str(normalises).lower()}")
    with jax.default_matmul_precision("highest"):
        found, sums = nnx.jit(lambda m, x: m(x, slots, 0, x))(experts, x)
    np.testing.assert_allclose(found, looped(experts, x, slots.segments_MxL, normalises), atol=1e-5)
    assert int(sums.counts_E.sum()) == CHOICES * 19 and int(sums.dropped) == 0
    np.testing.assert_allclose(sums.scores_E.sum(), 19, rtol=1e-5)


def deepseek_routes(
    logits_E: np.ndarray, bias_E: np.ndarray, groups: int, best: int, k: int
) -> dict[int, float]:
    """Returns a token's experts and their scores as DeepSeek-V3 has them (section 2.1.2), by
    sorting.
    """
    scores_E = 1 / (1 + np.exp(-logits_E))
    ranked_GxE = (scores_E + bias_E).reshape(groups, -1)
    order_G = np.argsort(-np.sort(ranked_GxE)[:, -2:].sum(axis=1), kind="stable")
    mine = (
        np.isin(np.arange(groups), order_G[:best])[:, None]
        .repeat(ranked_GxE.shape[1], axis=1)
        .reshape(-1)
    )
    chosen = np.argsort(-np.where(mine, scores_E + bias_E, -np.inf), kind="stable")[:k]
    return {int(e): float(scores_E[e]) for e in chosen}


@pytest.mark.parametrize(("groups", "best"), [(4, 2), (2, 1), (-1, -1)])
def test_sigmoid_scores_choose_within_groups_by_the_bias_and_weigh_without_it(groups, best):
    config = config_of(
        "model_name=tiny-deepseek", f"n_routing_groups={groups}", f"topk_routing_group={best}"
    ).model
    rng = np.random.default_rng(0)
    logits_1xLxE, bias_E = (
        rng.normal(size=(1, 40, 8)).astype(np.float32),
        rng.normal(size=8).astype(np.float32),
    )
    routes, shares_1xLxE = jax.jit(lambda logits, bias: choose(config, logits, bias))(
        logits_1xLxE, bias_E
    )
    for place in range(40):
        expected = deepseek_routes(
            logits_1xLxE[0, place], bias_E, *((groups, best) if groups > 0 else (1, 1)), k=2
        )
        assert routes.experts_MxLxk[0, place].tolist() == list(expected)
        weights = 2.5 * np.asarray(list(expected.values())) / sum(expected.values())
        np.testing.assert_allclose(routes.weights_MxLxk[0, place], weights, rtol=1e-5)
    np.testing.assert_allclose(shares_1xLxE.sum(axis=-1), 1, rtol=1e-6)  # of the balance loss


def test_a_capacity_drops_the_last_choices_of_a_row_whatever_the_other_rows_are(x, slots):
    experts = experts_of("norm_topk_prob=true", "capacity_factor=0.5")
    run = nnx.jit(lambda m, x, slots: m(x, slots, 0, x))
    together, sums = run(experts, x, slots)
    alone, _ = run(experts, x[:1], jax.tree.map(lambda array: array[:1], slots))
    np.testing.assert_allclose(together[:1], alone, atol=1e-6)
    # 0.5 x 12 x 2 / 5 and 0.5 x 7 x 2 / 5, rounded up, for each of five experts
    assert int(sums.dropped) >= CHOICES * 12 - 3 * 5 + CHOICES * 7 - 2 * 5
    vast = experts_of("norm_topk_prob=true", "capacity_factor=1e30")
    unbound, sums = nnx.jit(lambda m, x, slots: m(x, slots, 0, x))(vast, x, slots)
    assert int(sums.dropped) == 0
    # the first token of a row loses nothing
    np.testing.assert_allclose(together[0, 0], unbound[0, 0], atol=1e-6)


@pytest.mark.parametrize("keys", [(), ("capacity_factor=0.5",)])
def test_samples_that_share_rows_are_routed_as_in_rows_of_their_own(keys):
    """Their capacity, balance and routes are those of samples, wherever they lie."""
    experts = experts_of("norm_topk_prob=true", *keys)
    lengths = np.array([5, 12, 3, 7, 0, 4, 2])
    is_token = np.arange(LENGTH) < lengths[:, None]
    numbers = np.arange(is_token.size, dtype=np.int32).reshape(is_token.shape)
    # documents of two tokens, rows padded by token 7
    places = np.arange(LENGTH, dtype=np.int32)
    samples = {
        "tokens": np.where(is_token, numbers, 7),
        "segments": np.where(is_token, 1 + places // 2, 0),
        "weights": np.zeros(is_token.shape, np.float32),
        "x": np.where(is_token, numbers, 0),
    }
    rows = packed(samples, Passes.of(lengths, LENGTH, 2))
    table = jax.random.normal(jax.random.key(1), (is_token.size, WIDTH))

    def routed(arrays, begins=None):
        slots = routed_slots(*(jnp.asarray(arrays[n]) for n in ("tokens", "segments")), begins)
        x = table[arrays["x"]]
        y, sums = nnx.jit(lambda m, x, slots: m(x, slots, 0, x))(experts, x, slots)
        of_token = np.zeros((is_token.size, WIDTH))
        is_real = arrays["segments"] != 0
        of_token[arrays["x"][is_real]] = np.asarray(y)[is_real]
        return of_token, jax.tree.map(np.asarray, sums)

    (alone, wanted), (shared, found) = routed(samples), routed(rows, jnp.asarray(rows["begins"]))
    assert len(rows["tokens"]) == 3 and (wanted.dropped > 0) == bool(keys)
    np.testing.assert_allclose(shared, alone, atol=1e-6)
    for name in ("counts_E", "dropped", "limbs_4"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    for name in ("scores_E", "sequence", "squares"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-5)


def test_the_hash_of_routes_tells_experts_layers_and_rows_apart(x, slots):
    experts = experts_of("norm_topk_prob=true")
    run = nnx.jit(lambda m, x, slots, layer: m(x, slots, layer, x)[1].limbs_4)
    others = [
        run(experts, x, slots, 1),
        run(experts, -x, slots, 0),
        run(experts, x, slots._replace(hashes_MxL=slots.hashes_MxL + np.uint32(1)), 0),
    ]
    found = run(experts, x, slots, 0)
    assert all((found != other).any() for other in others)
    swapped = jax.tree.map(lambda array: array[::-1], slots)
    np.testing.assert_array_equal(run(experts, x[::-1], swapped, 0), found)  # rows may lie anywhere


def test_the_bias_moves_the_choice_and_no_weight(x, slots):
    experts = experts_of("norm_topk_prob=false", "routed_bias=true")
    experts.routed_bias[...] = jnp.asarray([0.0, 0.0, 9.0, 9.0, 0.0])
    _, sums = nnx.jit(lambda m, x: m(x, slots, 0, x))(experts, x)
    assert sums.counts_E.tolist() == [0, 0, 19, 19, 0]
    unbiased = experts_of("norm_topk_prob=false")
    _, plain = nnx.jit(lambda m, x: m(x, slots, 0, x))(unbiased, x)
    np.testing.assert_allclose(sums.scores_E, plain.scores_E, rtol=1e-6)
