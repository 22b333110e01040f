"""What a Hugging Face folder states of the end of a text is ids, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.around.huggingface.folder.config_json import keys_of_folder
from maxbatch.config.model_forms import end_tokens


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("{}", ()),
        ('{"eos_token_id": null}', ()),
        ('{"eos_token_id": 2}', (2,)),
        ('{"eos_token_id": [2, 7]}', (2, 7)),
    ],
)
def test_the_ends_of_a_text_are_those_of_generation_config(
    tmp_path: Path, text: str, ids: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert end_tokens(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(text)
    assert end_tokens(tmp_path) == ids


@pytest.mark.parametrize(
    "value", ["true", '"2"', "2.0", "-1", "[2, null]", "[[2]]", '{"a": 2}', "4294967296", "NaN"]
)
def test_an_end_that_is_no_id_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(
        ConfigError,
        match=r"generation_config\.json: (eos_token_id=.*must be the id of a token|is not JSON)",
    ):
        end_tokens(tmp_path)


def test_packed_weights_of_4_bits_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": '
        '{"quant_method": "mxfp4"}}'
    )
    with pytest.raises(
        ConfigError, match=r"quant_method=mxfp4: packed 4-bit weights are not read; works: "
    ) as error:
        keys_of_folder(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama4_text", "floor_scale", 4096),
        ("llama4_text", "attn_scale", 0.2),
        ("qwen3_next", "linear_conv_kernel_dim", 3),
        ("qwen3_5_moe_text", "linear_value_head_dim", 64),
        ("qwen3_next", "shared_expert_intermediate_size", 500),
        (
            "qwen3_next",
            "layer_types",
            ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        ),
    ],
)
def test_values_that_no_published_model_of_a_family_has_are_refused_by_name(
    tmp_path: Path, family: str, field: str, value: object
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    keys_of_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes, field: value}))
    with pytest.raises(ConfigError, match=field) as error:
        keys_of_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_gemmas_gelu_is_the_one_by_tanh(tmp_path: Path) -> None:
    sizes = (
        '"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, '
        '"intermediate_size": 48'
    )
    # transformers reads the first by tanh too
    for name, ours in (("gelu", "gelu,linear"), ("silu", "silu,linear")):
        text = f'{{"model_type": "gemma", {sizes}, "vocab_size": 300, "hidden_act": "{name}"}}'
        (tmp_path / "config.json").write_text(text)
        assert keys_of_folder(tmp_path)["mlp_activations"] == ours
