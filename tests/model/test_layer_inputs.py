"""The form of Gemma 4's small models: an input of each layer, shared keys and values; its counts
and refusals.
"""

from __future__ import annotations

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.huggingface.folder.model_fields import config_json, model_keys
from maxbatch.families.cycle import cycle_of, places_of_keys
from maxbatch.families.matrices import model_size, parameters
from maxbatch.model.flops import model_flops_per_token
from maxbatch.plan.mesh_shape import MeshShape, check_model_fits
from tests.helpers.tiny import LENGTH, tiny_config

WIDTH = 256  # of an input
FORM = (
    "decoder_block=gemma4_small",
    "base_num_decoder_layers=6",
    "attention_type=local_sliding,global",
    "sliding_window_size=8",
    "num_kv_shared_layers=4",
    "use_double_wide_mlp=true",
    "use_qk_norm=true",
    "query_pre_attn_scalar=1",
    "mlp_activations=gelu,linear",
)
# Parameters of transformers' models of these sizes, on the meta device, with the factor of each
# layer's output.
PUBLISHED = {
    4_628_569_379: (
        "base_num_decoder_layers=35",
        "base_emb_dim=1536",
        "base_num_kv_heads=1",
        "base_mlp_dim=6144",
        "num_kv_shared_layers=20",
        "use_double_wide_mlp=true",
        f"attention_type={4 * 'local_sliding,'}global",
    ),
    7_463_013_418: (
        "base_num_decoder_layers=42",
        "base_emb_dim=2560",
        "base_num_kv_heads=2",
        "base_mlp_dim=10240",
        "num_kv_shared_layers=18",
        "use_double_wide_mlp=false",
        f"attention_type={'local_sliding,' * 5}global",
    ),
}
HUGGING_FACE = {
    "model_type": "gemma4_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 300,
    "num_kv_shared_layers": 2,
}


@pytest.mark.parametrize("expected", PUBLISHED)
def test_the_published_models_have_as_many_parameters_as_in_transformers(expected: int) -> None:
    config = load_config(
        overrides=[
            *FORM,
            "base_num_query_heads=8",
            "head_dim=256",
            "vocab_size=262144",
            "sliding_window_size=512",
            *PUBLISHED[expected],
        ]
    )
    assert model_size(config.decoder) == expected


def test_parameters_and_flops_count_inputs_shared_keys_and_wide_mlps() -> None:
    config = tiny_config(*FORM).decoder
    own, of_queries = 32 * (4 + 2 + 2 + 4), 32 * (4 + 4)
    attention = own * (8 + 16) + 2 * of_queries * (8 + 16)
    mlps, inputs = 3 * 32 * (2 * 64 + 4 * 128), 6 * 2 * 32 * WIDTH
    made = 32 * 6 * WIDTH
    vectors = 6 * (5 * 32 + 1) + 32 + WIDTH
    of_heads = 2 * (8 + 16) + 2 * (8 + 16)
    table = 264 * 6 * WIDTH
    matrices = attention + mlps + inputs + made + 264 * 32
    assert model_size(config) == matrices + table + vectors + of_heads
    seen = 3 * (2 * 8 - 8 * 8 // LENGTH) * 2 * 8 + 3 * LENGTH * 2 * 16
    assert model_flops_per_token(config) == 6 * matrices + 3 * 4 * seen


def test_a_layer_takes_the_keys_of_the_last_layer_that_sees_as_much() -> None:
    config = tiny_config(
        *FORM, "attention_type=local_sliding,global,local_sliding", "num_kv_shared_layers=3"
    )
    assert places_of_keys(cycle_of(config.model)) == (2, 1, 2)
    names = {row.name for row in parameters(config.model)}
    assert "layers.0.attention.key" in names and "kv_shared_layers.0.attention.query" in names
    assert not [
        name
        for name in names
        if name.startswith("kv_shared") and ("key" in name.split("attention.")[-1])
    ]


def test_a_pipeline_is_refused() -> None:
    config = tiny_config(*FORM, "ici_pipeline_parallelism=2")
    with pytest.raises(
        ConfigError,
        match=r"ici_pipeline_parallelism=2: the pipeline axis of 2 must divide 1 beside",
    ):
        check_model_fits(config.plan, MeshShape.from_config(config.plan, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hidden_size_per_layer_input": 128},
            "hidden_size_per_layer_input=128 is not supported for gemma4",
        ),
        (
            {"vocab_size_per_layer_input": 200},
            "vocab_size_per_layer_input=200 is not supported for gemma4_small",
        ),
        ({"attention_k_eq_v": True}, "attention_k_eq_v=True is not supported for gemma4_small"),
        ({"enable_moe_block": True, "num_experts": 4}, "num_experts=4 is not supported"),
    ],
)
def test_what_hugging_face_may_state_and_the_form_lacks_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_keys(HUGGING_FACE | fields, "config.json")


def test_a_folder_of_hugging_face_is_the_one_or_the_other_family_by_its_inputs() -> None:
    found = model_keys(HUGGING_FACE, "config.json")
    assert (found["decoder_block"], found["num_kv_shared_layers"]) == ("gemma4_small", "2")
    others = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
    assert model_keys(HUGGING_FACE | others, "config.json")["decoder_block"] == "gemma4"


def test_more_key_heads_in_global_layers_are_not_exported() -> None:
    with pytest.raises(
        ConfigError, match=r"global_num_kv_heads=1: .*Hugging Face's gemma4_text cannot express it"
    ):
        config_json(tiny_config(*FORM, "global_num_kv_heads=1").decoder, "float32", {})
