"""Parameters that no loss depends on have a gradient of exactly 0, so that no optimizer walks them
by rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.config.loading import load_config
from maxbatch.model.decoder import Decoder
from maxbatch.model.experts.routing import choose
from maxbatch.model.loss import token_logprobs
from maxbatch.plan.batch import BatchPlan

SMALL = (
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=32",
    "base_num_decoder_layers=2",
    "vocab_size=32",
    "max_target_length=12",
    "dtype=float32",
)
TOP_1 = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=1", "norm_topk_prob=true")


def gradients(*keys: str) -> dict[str, float]:
    """Returns the largest gradient of each parameter."""
    config = load_config(overrides=[*SMALL, *keys]).decoder
    model = Decoder(config, rngs=nnx.Rngs(params=0))
    graphdef, params = nnx.split(model, nnx.Param)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(0, 0.3, x.shape), x.dtype), params)
    tokens_MxL = jnp.asarray(draw.integers(1, 32, (3, 12)), jnp.int32)

    def loss(params: nnx.State) -> jax.Array:
        scores = token_logprobs(
            nnx.merge(graphdef, params), tokens_MxL, jnp.ones_like(tokens_MxL), batch_shards=1
        )
        return -jnp.sum(scores.logprobs_MxL)

    found = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    return {
        jax.tree_util.keystr(path): float(jnp.max(jnp.abs(gradient))) for path, gradient in found
    }


@pytest.mark.runs
@pytest.mark.parametrize(
    ("keys", "blind"),
    [
        (
            (
                "decoder_block=gpt2",
                "attention_bias=true",
                "trainable_position_size=12",
                "mlp_activations=gelu",
            ),
            "key_bias",
        ),
        # its keys are rotated behind the bias
        (("decoder_block=qwen2", "attention_bias=true"), ""),
        # norms
        (
            (
                "decoder_block=qwen3",
                "use_qk_norm=true",
                "attention_bias=true",
                "trainable_position_size=12",
            ),
            "",
        ),
        (TOP_1, "router"),
    ],
    ids=["gpt2", "qwen2", "normalised keys", "one expert"],
)
def test_a_gradient_that_is_zero_in_exact_arithmetic_is_zero(
    keys: tuple[str, ...], blind: str
) -> None:
    found = gradients(*keys)
    zero = {name for name, largest in found.items() if largest == 0}
    assert zero == {name for name in found if blind and blind in name} and bool(zero) == bool(blind)
    assert all(largest > 1e-4 for name, largest in found.items() if name not in zero), found


def test_the_weight_of_one_expert_that_is_normalised_is_exactly_1() -> None:
    config = load_config(overrides=[*SMALL, *TOP_1]).model
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 9, (2, 12, 4)), jnp.float32)
    assert (np.asarray(choose(config, logits, None)[0].weights_MxLxk) == 1).all()


def test_a_router_that_does_not_learn_is_told() -> None:
    plan = BatchPlan.from_config(load_config(overrides=[*SMALL, *TOP_1, "steps=2"]))
    assert [line for line in plan.warnings if line.startswith("the router does not learn")]
    for keys in (("num_experts_per_tok=2",), ("load_balance_loss_weight=0.01",)):
        plan = BatchPlan.from_config(load_config(overrides=[*SMALL, *TOP_1, "steps=2", *keys]))
        assert not [line for line in plan.warnings if "router" in line]
