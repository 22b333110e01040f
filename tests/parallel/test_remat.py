"""What a rematerialisation policy keeps for the backward pass."""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from maxbatch.config.sections import KEYS
from maxbatch.families.cycle import LayerForm
from maxbatch.families.forms.attention import GROUPED
from maxbatch.model.layer import Beside, DecoderLayer
from maxbatch.model.rope import frequencies_of, rope_tables
from maxbatch.model.segments import Slots
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import unconstrained
from tests.helpers.tiny import tiny_config


@cache
def kept_values(policy: str, *overrides: str) -> int:
    """Returns how many numbers of its tokens a layer keeps besides its input."""
    config = tiny_config(f"remat_policy={policy}", *overrides)
    dense = LayerForm(GROUPED, has_experts=False)
    one = DecoderLayer(config, "layers", dense, rngs=nnx.Rngs(0), constrain=unconstrained)
    graphdef, parameters = nnx.split(one, nnx.Param)
    length = config.max_target_length
    rope = rope_tables(length, frequencies_of(config.head_dim, 10_000))
    x_MxLxD = jnp.ones((2, length, config.base_emb_dim), config.dtype)
    segments_MxL = jnp.ones((2, length), jnp.int32)

    beside = Beside(is_local=False, number=None, input_MxLxP=None)

    def layer(parameters: nnx.State, x_MxLxD: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, parameters)(x_MxLxD, Slots(segments_MxL), rope, beside).x_MxLxD

    _, backward = jax.vjp(
        checkpointed(layer, Remat.of(config.remat), in_loop=False), parameters, x_MxLxD
    )
    of_tokens = [
        array.shape for array in jax.tree.leaves(backward) if array.shape[:2] == x_MxLxD.shape[:2]
    ]
    return sum(map(math.prod, of_tokens)) - x_MxLxD.size - segments_MxL.size


@pytest.mark.runs
@pytest.mark.parametrize("norms", ["use_qk_norm=false", "use_qk_norm=true"])
def test_minimal_keeps_every_product_once(norms: str) -> None:
    config = tiny_config(norms)
    tokens = 2 * config.max_target_length
    heads = (config.base_num_query_heads + 2 * config.base_num_kv_heads) * config.head_dim
    products = heads + config.base_emb_dim + 2 * config.base_mlp_dim
    assert kept_values("minimal", norms) == tokens * products, (
        "the output of the MLP's last product is needed by none"
    )
    assert kept_values("save_qkv_proj", norms) == tokens * heads
    assert kept_values("save_out_proj", norms) == tokens * config.base_emb_dim
    assert kept_values("full", norms) == 0


def test_policies_are_ordered_by_what_they_keep() -> None:
    kept = [
        kept_values(policy)
        for policy in KEYS["remat_policy"].choices
        if policy not in ("save_out_proj", "custom")
    ]
    assert kept == sorted(kept, reverse=True)


def test_custom_keeps_the_tensors_that_are_named() -> None:
    config = tiny_config()
    tokens = 2 * config.max_target_length
    assert kept_values("custom") == kept_values("full")
    queries = config.base_num_query_heads * config.head_dim
    assert kept_values("custom", "query_proj=device") == tokens * queries
    assert kept_values("custom", "mlpwi_1=device", "query_proj=device") == tokens * (
        queries + config.base_mlp_dim
    )
    products = [f"{name}=device" for name in ("query_proj", "key_proj", "value_proj", "out_proj")]
    products += [f"{name}=device" for name in ("mlpwi_0", "mlpwi_1", "mlpwo")]
    assert kept_values("custom", *products) == kept_values("minimal")
