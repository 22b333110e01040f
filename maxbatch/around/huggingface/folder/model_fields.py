"""A model as config keys, and as the fields of a Hugging Face `config.json`.

Files are read as transformers 4 and 5 write them, and written in the format of 4, which 5 reads
too.
"""

from __future__ import annotations

from typing import Any

from maxbatch.around.huggingface.folder.config_rows import FORMS, MOST_OF_FORMS
from maxbatch.around.huggingface.folder.stated_model import (
    StatedModel,
    family_of,
    fields_of_family,
)
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.sections import KEYS
from maxbatch.config.values import value_text
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.attention import is_local_layer
from maxbatch.families.record import Json
from maxbatch.system.errors import ConfigError

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that an exported model keeps from its imported folder; no key states them.
_KEPT = (
    *TOKEN_IDS,
    "max_position_embeddings",
    "original_max_position_embeddings",
    "initializer_range",
)
# Defaults where a family lacks them.
_ABSENT = ("trainable_position_size", "local_rope_max_timescale", "rope_type", "rope_truncate")


def model_keys(fields: Json, where: str) -> dict[str, str]:
    """Returns the texts of the model keys that a `config.json` states; `where` names it in
    messages.

    Raises:
      ConfigError: a family, or a setting of one, that is not supported; a field is missing or of
        another type.
    """
    family = family_of(fields, where)
    keys: dict[str, object] = {}
    try:
        model = StatedModel(family, fields, where, MOST_OF_FORMS)
        for form in FORMS:
            keys |= form.keys(model)
    except KeyError as error:
        raise ConfigError(f"{where}: lacks {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        raise ConfigError(f"{where}: a field of the model has a value of the wrong type") from None
    texts = {True: "true", False: "false", None: "null"}
    return {
        name: texts[value] if value is None or isinstance(value, bool) else str(value)
        for name, value in keys.items()
    }


def config_json(config: DecoderConfig, dtype: str, source: Json) -> Json:
    """Returns the `config.json` of a model.

    Args:
      config: its keys.
      dtype: of the tensors, as `float32`.
      source: the fields of the folder that it was imported from, or its token ids.

    Raises:
      ConfigError: a `config.json` of the family of its `decoder_block` cannot express a key.
    """
    family = FAMILIES[config.decoder_block]
    fields = _kept(config, source) | fields_of_family(config, family)
    for form in FORMS:
        fields |= form.fields(config, family)
    written = {family.fields.get(field, field): value for field, value in fields.items()}
    written |= {"torch_dtype": dtype, "use_cache": True}
    _check(config, family.model_type, written)
    return dict(sorted(written.items()))


def _kept(config: DecoderConfig, source: Json) -> Json:
    """Returns the fields that an imported model had, and the length of its context."""
    kept = {field: source[field] for field in _KEPT if field in source}
    kept.setdefault("max_position_embeddings", config.max_target_length)
    if config.rope_type == "longrope":
        original = config.original_max_position_embeddings
        kept["original_max_position_embeddings"] = original
        kept["max_position_embeddings"] = round(config.rope_factor * original)
    return kept


def _check(config: DecoderConfig, name: str, written: Json) -> None:
    """Raises ConfigError unless the written fields read back as the config's own keys."""
    read = {key: KEYS[key].read(text) for key, text in model_keys(written, name).items()}
    read = {key: KEYS[key].default_value for key in _ABSENT} | read
    has_windows = any(is_local_layer(config.attention_type, config.base_num_decoder_layers))
    family = FAMILIES[config.decoder_block]
    for key in read:
        ours: Any = config[key]
        value: Any = read[key]
        # Values that differ, and mean the same model.
        if key == "query_pre_attn_scalar":
            ours, value = ours or config.head_dim, value or read["head_dim"]
        if key == "global_num_kv_heads":
            ours, value = ours or config.base_num_kv_heads, value or config.base_num_kv_heads
        if key == "attention_type":
            layers = config.base_num_decoder_layers
            ours, value = is_local_layer(ours, layers), is_local_layer(str(value), layers)
        if key == "local_rope_max_timescale" and config.rope_type == "default":
            ours, value = (
                base if base > 0 else config.rope_max_timescale for base in (ours, value)
            )
        if key in family.attention.unread or (key == "mscale" and config.rope_type != "yarn"):
            continue
        if key in ("n_routing_groups", "topk_routing_group") and config.n_routing_groups <= 1:
            continue
        if key == "topk_routing_group" and ours == -1:
            ours = config.n_routing_groups
        if key in ("base_moe_mlp_dim", "base_mlp_dim") and family.experts:
            continue  # one width is stated; the other one is the same or not used
        if key == "sliding_window_size" and not has_windows:
            continue
        if ours != value:
            raise ConfigError(
                f"{key}={value_text(config[key])}: Hugging Face's {name} cannot express it; "
                "works: a decoder_block whose family can"
            )
