"""A decoder's parameters match the table, with its shapes and axes, in every family."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch import load_config
from maxbatch.families.cycle import cycle_of
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import num_stacked, parameters, shape_of
from maxbatch.model.decoder import Decoder
from maxbatch.model.layer import DecoderLayer
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.sharding import unconstrained
from maxbatch.update.state import abstract_model

FORMS = {
    "plain": (),
    "biases": ("attention_bias=true", "attention_out_bias=true", "mlp_projection_bias=true"),
    "positions": ("use_qk_norm=true", "mlp_activations=gelu", "trainable_position_size=512"),
    "untied": ("logits_via_embedding=false", "base_num_decoder_layers=1"),
}
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "norm_topk_prob=true", "base_moe_mlp_dim=24")
# What families with experts, and that of latents, have in place of a form that they lack.
FORMS_OF_EXPERTS = FORMS | {"positions": ("use_qk_norm=true", "trainable_position_size=512")}
FORMS_OF_GLOBAL_HEADS = FORMS | {
    "plain": ("attention_type=local_sliding,global", "sliding_window_size=8"),
    "positions": ("global_num_kv_heads=1", "partial_rotary_factor=0.5"),
    "untied": (
        "num_experts=1",
        "num_experts_per_tok=1",
        "norm_topk_prob=false",
        "base_moe_mlp_dim=-1",
    ),
}
FORMS_OF_LAYER_INPUTS = FORMS | {
    "plain": (
        "attention_type=local_sliding,global",
        "sliding_window_size=8",
        "num_kv_shared_layers=2",
    ),
    "positions": ("global_num_kv_heads=1", "num_kv_shared_layers=3", "use_double_wide_mlp=true"),
}
FORMS_OF_LATENTS = FORMS | {
    "biases": ("q_lora_rank=16", "shared_experts=2", "routed_bias=true"),
    "positions": ("first_num_dense_layers=3", "rope_type=yarn", "rope_factor=4"),
}
DELTA_RULE = (
    "shared_experts=2",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=4",
    "gdn_key_head_dim=6",
    "partial_rotary_factor=0.25",
)


def keys_of(family: str, form: str) -> tuple[str, ...]:
    record = FAMILIES[family]
    if record.last_layers:
        return FORMS_OF_LAYER_INPUTS[form]
    if not record.experts:
        return FORMS[form]
    own = (
        ("interleave_moe_layer_step=2", "base_num_decoder_layers=4")
        if "interleave_moe_layer_step" in record.own_keys
        else ()
    )
    if "gdn_num_key_heads" in record.own_keys:
        own += ("inhomogeneous_layer_cycle_interval=2", "base_num_decoder_layers=4", *DELTA_RULE)
    if record.experts.weigh_inputs:
        own += ("routed_score_func=sigmoid", "norm_topk_prob=false", "shared_experts=1")
    forms = FORMS_OF_GLOBAL_HEADS if record.attention.has_global_heads else FORMS_OF_EXPERTS
    return (
        *EXPERTS,
        *(FORMS_OF_LATENTS if "kv_lora_rank" in record.own_keys else forms)[form],
        *own,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_has_the_parameters_of_the_table_and_no_others(family: str, form: str) -> None:
    config = load_config(overrides=[f"decoder_block={family}", *keys_of(family, form)])
    _, params = abstract_model(config.decoder)
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    found = {
        parameter_path(path): (one.get_value().shape, tuple(one.get_metadata("logical_axes")))
        for path, one in leaves
    }
    model = config.model
    expected = {}
    for row in parameters(model):
        stack = [(row.path[0], num_stacked(model, row.path[0]))] if row.is_stacked else []
        axes = [*stack, *zip(row.axes, shape_of(row, model), strict=True)]
        expected[row.path] = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    assert found == expected


# Sums of first values, each times the cosine of its place, by families that together have every
# kind of parameter.
FIRST_VALUES = {
    "llama2": 4.866598611796,
    "gpt2": 2.899186186550,
    "gemma4_small": 59.850368803669,
    "deepseek": -56.784461140343,
    "qwen3_next": 21.948082134467,
}


@pytest.mark.runs
@pytest.mark.parametrize("family", FIRST_VALUES)
def test_a_seed_gives_the_first_values_of_every_release(family: str) -> None:
    form = "positions" if family == "gpt2" else "plain"
    small = ("base_emb_dim=32", "base_mlp_dim=48", "head_dim=8", "vocab_size=64")
    config = load_config(
        overrides=[f"decoder_block={family}", *small, *keys_of(family, form)]
    ).decoder
    params = jax.jit(
        lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(params=jax.random.key(7))), nnx.Param)
    )()
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)]
    assert sum(leaf @ np.cos(np.arange(leaf.size)) for leaf in leaves) == pytest.approx(
        FIRST_VALUES[family], rel=1e-6
    )


def test_values_of_layers_are_those_of_each_layer_alone_from_its_own_key() -> None:
    config = load_config(
        overrides=["base_emb_dim=32", "base_mlp_dim=48", "head_dim=8", "weight_dtype=bfloat16"]
    ).decoder
    layer = partial(DecoderLayer, config, "layers", cycle_of(config)[0], constrain=unconstrained)
    stacked = nnx.state(Decoder(config, rngs=nnx.Rngs(params=7)).layers)
    rngs = nnx.Rngs(params=7)
    rngs.params()  # the embedding's
    keys = jax.random.split(rngs.params(), config.base_num_decoder_layers)
    for number, key in enumerate(keys):
        alone = jax.tree.leaves(nnx.state(layer(rngs=nnx.Rngs(params=key))))
        for one, of_all in zip(alone, jax.tree.leaves(stacked), strict=True):
            np.testing.assert_array_equal(one, of_all[number])
