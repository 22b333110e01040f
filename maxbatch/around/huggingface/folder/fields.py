"""The types and bounds of the fields of a Hugging Face `config.json`, which are checked
before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxbatch.config.values import shown
from maxbatch.families.family import Json
from maxbatch.system.errors import ConfigError

_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_MOST_REAL = 1e30
_WHOLE = {
    **dict.fromkeys(
        (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "sliding_window",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_shared_experts",
            "n_group",
            "topk_group",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "intermediate_size_mlp",
            "attention_chunk_size",
            "shared_expert_intermediate_size",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "global_head_dim",
            "num_global_key_value_heads",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
        ),
        _MOST,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "max_window_layers",
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "first_k_dense_replace",
            "num_nextn_predict_layers",
            "interleave_moe_layer_step",
            "no_rope_layer_interval",
            "full_attention_interval",
            "num_kv_shared_layers",
        ),
        _MOST_LAYERS,
    ),
}
_REAL = (
    "rms_norm_eps",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_theta",
    "rope_local_base_freq",
    "routed_scaling_factor",
    "partial_rotary_factor",
)
_TEXT = ("model_type", "hidden_act")
_NUMBERS = ("moe_layers", "no_rope_layers")
_OBJECTS = ("rope_parameters", "rope_scaling")


def check_fields(fields: Json, own_names: Mapping[str, str], where: str) -> None:
    """Raises ConfigError for a field of the wrong type or beyond its bound; null stands for a field
    that is missing.

    Args:
      stated: the fields by their common names.
      own_names: the names of the family, by the common ones, for messages.
      where: names the file in messages.
    """

    def refuse(field: str, value: object, rule: str) -> ConfigError:
        name = own_names.get(field, field)
        return ConfigError(f"{where}: {name}={shown(repr(value))}: must be {rule}")

    for field, most in _WHOLE.items():
        value = fields.get(field)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise refuse(field, value, f"a whole number from 0 to {most}")
    for field in (*_REAL, *_TEXT, *_OBJECTS, *_NUMBERS, "layer_types"):
        value = fields.get(field)
        if value is None:
            continue
        if field in _REAL and not _is_real(value):
            raise refuse(field, value, f"a number up to {_MOST_REAL:g}")
        if field in _TEXT and not isinstance(value, str):
            raise refuse(field, value, "a text")
        if field in _OBJECTS and not (
            isinstance(value, dict) and all(map(_is_plain, value.values()))
        ):
            raise refuse(
                field, value, f"an object of texts, numbers up to {_MOST_REAL:g} and lists of them"
            )
        if field in _NUMBERS and not _is_short_list(value, int):
            raise refuse(field, value, f"a list of at most {_MOST_LAYERS} whole numbers")
        if field == "layer_types" and not _is_short_list(value, str):
            raise refuse(field, value, f"a list of at most {_MOST_LAYERS} texts")


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_REAL


def _is_short_list(value: object, kind: type) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_LAYERS
        and all(isinstance(item, kind) for item in value)
    )


def _is_plain(value: object) -> bool:
    """Returns whether a value is a text, a flag, null, a real number, a list of these, or an object
    of all of them.
    """
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return len(value) <= _MOST_LAYERS and all(
            not isinstance(item, dict | list) and _is_plain(item) for item in value
        )
    return value is None or isinstance(value, bool | str) or _is_real(value)
