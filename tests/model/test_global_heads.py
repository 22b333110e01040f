"""Gemma 4's form: heads of other sizes in global layers, RoPE on a part of them, its counts, its
refusals.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch import ConfigError
from maxbatch.around.huggingface.folder.model_fields import config_json, model_keys
from maxbatch.families.matrices import active_model_size, model_size
from maxbatch.model.flops import model_flops_per_token
from maxbatch.model.rope import RopeKeys, Ropes, apply_rope
from tests.helpers.tiny import tiny_config

LENGTH = 32
FORM = (
    "decoder_block=gemma4",
    "base_num_decoder_layers=4",
    "attention_type=local_sliding,global",
    "sliding_window_size=8",
    "global_num_kv_heads=1",
    "use_qk_norm=true",
    "query_pre_attn_scalar=1",
    "partial_rotary_factor=0.25",
    "mlp_activations=gelu,linear",
)
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "norm_topk_prob=true")
HUGGING_FACE = {
    "model_type": "gemma4_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}


def test_a_part_of_a_global_head_is_rotated_and_the_whole_of_a_local_one() -> None:
    config = tiny_config(*FORM, "rope_max_timescale=100", "local_rope_max_timescale=10")
    ropes = Ropes(RopeKeys.from_config(config.model), LENGTH)
    x_MxLxHxh = jnp.asarray(
        np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)), jnp.float32
    )
    found = apply_rope(x_MxLxHxh, ropes.of(False, lambda: jnp.ones(1)))
    # 2 of 8 pairs
    angles = np.outer(np.arange(LENGTH), 100.0 ** (-2 * np.arange(2) / 16))[None, :, None]
    first, second = np.asarray(x_MxLxHxh[..., :2]), np.asarray(x_MxLxHxh[..., 8:10])
    np.testing.assert_allclose(
        found[..., :2], first * np.cos(angles) - second * np.sin(angles), atol=1e-5
    )
    np.testing.assert_allclose(
        found[..., 8:10], second * np.cos(angles) + first * np.sin(angles), atol=1e-5
    )
    for begin, end in ((2, 8), (10, 16)):
        np.testing.assert_array_equal(found[..., begin:end], x_MxLxHxh[..., begin:end])
    one_base = tiny_config(*FORM, "rope_max_timescale=10")  # of all layers
    for each in (config, one_base):
        cos, _ = Ropes(RopeKeys.from_config(each.model), LENGTH).of(True, lambda: jnp.ones(1))
        expected = np.cos(np.outer(np.arange(LENGTH), 10.0 ** (-np.arange(4) / 4)))
        np.testing.assert_allclose(cos, expected, atol=1e-5)


def test_parameters_and_flops_count_the_heads_of_each_layer() -> None:
    config = tiny_config(*FORM, *EXPERTS).decoder
    local, global_ = 32 * (4 + 2 + 2 + 4) * 8, 32 * (4 + 1 + 4) * 16
    mlp, expert = 3 * 32 * 64, 3 * 32 * 16
    # norms, the layer's number, scales of the router's input and of experts
    vectors = 7 * 32 + 1 + 32 + 4
    of_heads = 2 * (2 * 8 + 2 * 16)
    layers = 2 * local + 2 * global_ + 4 * (mlp + 32 * 4 + vectors) + of_heads
    assert model_size(config) == layers + 4 * 4 * expert + 264 * 32 + 32
    assert active_model_size(config) == layers + 4 * 2 * expert + 264 * 32 + 32
    matrices = 2 * local + 2 * global_ + 4 * (mlp + 32 * 4 + 2 * expert) + 264 * 32
    seen = 2 * (2 * 8 - 8 * 8 // LENGTH) * 2 * 8 + 2 * LENGTH * 2 * 16
    assert model_flops_per_token(config) == 6 * matrices + 3 * 4 * seen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": 128}, "hidden_size_per_layer_input=128 is not supported"),
        ({"hidden_size_per_layer_input": None}, ""),
        ({"num_hidden_layers": 0, "layer_types": None}, ""),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 is not supported"),
        (
            {"global_head_dim": 12},
            "global_head_dim=12 is not supported.* twice as wide as head_dim=8",
        ),
        ({"attention_k_eq_v": False}, "attention_k_eq_v=False is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "the last layer must be full_attention"),
        (
            {"per_layer_config": {"0": {"head_dim": 16}}},
            "per_layer_config is not supported unless all full_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters=.*yarn",
        ),
    ],
)
def test_what_hugging_face_may_state_and_the_form_lacks_is_refused(
    fields: dict[str, object], message: str
) -> None:
    if not message:
        assert model_keys(HUGGING_FACE | fields, "config.json")["decoder_block"] == "gemma4"
        return
    with pytest.raises(ConfigError, match=message):
        model_keys(HUGGING_FACE | fields, "config.json")


def test_heads_of_global_layers_are_read_where_layers_state_them() -> None:
    heads = {"head_dim": 16, "num_key_value_heads": 1}
    stated = HUGGING_FACE | {"per_layer_config": {"1": heads, "3": heads}}
    found = model_keys(stated, "config.json")
    assert found["global_num_kv_heads"] == "1"


@pytest.mark.parametrize("key", ["query_pre_attn_scalar=8"])
def test_keys_that_transformers_lack_are_not_exported(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key.partition('=')[0]}=.*Hugging Face's gemma4_text cannot express it"
    ):
        config_json(tiny_config(*FORM, key).decoder, "float32", {})
