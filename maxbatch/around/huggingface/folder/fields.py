"""The types and bounds of the fields of a Hugging Face `config.json`, which are checked
before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxbatch.config.values import shown
from maxbatch.families.record import Json
from maxbatch.system.errors import ConfigError

MOST = 2**31 - 1
MOST_LAYERS = 10_000
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
        ),
        MOST,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "max_window_layers",
            "sliding_window_pattern",
            "_sliding_window_pattern",
        ),
        MOST_LAYERS,
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


def check_fields(
    fields: Json, own_names: Mapping[str, str], where: str, most_of_forms: Mapping[str, int]
) -> None:
    """Raises ConfigError for a field of the wrong type or beyond its bound; null stands for a field
    that is missing.

    Args:
      stated: the fields by their common names.
      own_names: the names of the family, by the common ones, for messages.
      where: names the file in messages.
      most_of_forms: the largest value of each whole number that few families have.
    """

    def refuse(field: str, value: object, rule: str) -> ConfigError:
        name = own_names.get(field, field)
        return ConfigError(f"{where}: {name}={shown(repr(value))}: must be {rule}")

    for field, most in (_WHOLE | dict(most_of_forms)).items():
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
            raise refuse(field, value, f"a list of at most {MOST_LAYERS} whole numbers")
        if field == "layer_types" and not _is_short_list(value, str):
            raise refuse(field, value, f"a list of at most {MOST_LAYERS} texts")


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_REAL


def _is_short_list(value: object, kind: type) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_LAYERS
        and all(isinstance(item, kind) for item in value)
    )


def _is_plain(value: object) -> bool:
    """Returns whether a value is a text, a flag, null, a real number, a list of these, or an object
    of all of them.
    """
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return len(value) <= MOST_LAYERS and all(
            not isinstance(item, dict | list) and _is_plain(item) for item in value
        )
    return value is None or isinstance(value, bool | str) or _is_real(value)
