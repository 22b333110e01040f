"""Rules of MaxText's table on the model: its presets, dimensions, blocks and RoPE."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from maxbatch.around.importers.maxtext_defaults import default_of
from maxbatch.around.importers.table import Condition, Rule
from maxbatch.around.importers.translation import Translation
from maxbatch.around.maxtext.checkpoints.names import FAMILIES_OF_MAXTEXT
from maxbatch.config.loading import load_config
from maxbatch.config.paths import presets
from maxbatch.config.sections import KEYS, ModelConfig
from maxbatch.families.family import FAMILIES

# Families of MaxText that version 0.5.0 was the last to have, and the nearest of today's.
_FORMER = {"envy": "llama4", "qwen3_custom_moe": "qwen3_moe"}
_LLAMA_BLOCKS = ("llama2", "llama3", "default")
_NORMALISING = tuple(
    name
    for name, family in FAMILIES.items()
    if family.experts and family.experts.always_normalise and not family.experts.are_beside_mlp
)
_ACTIVATIONS = KEYS["mlp_activations"].choices
# The dimensions of a model without a name, which MaxText's defaults state.
_DIMENSIONS = (
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "head_dim",
    "vocab_size",
    "logits_via_embedding",
    "normalization_layer_epsilon",
    "rope_max_timescale",
)


def is_preset(t: Translation, _: str) -> bool:
    return t.text("model_name") in presets()


def _dimensions(t: Translation, _: str) -> None:
    for word in _DIMENSIONS:
        if word not in t:
            t.settings.setdefault(word, default_of(word))
    _scale(t)


def _scale(t: Translation) -> None:
    """Takes the factor of all dimensions: powers of 2 go in turn to heads and MLP, width, and
    layers.
    """
    scale = t.number("global_parameter_scale") or 1.0
    if scale <= 1:
        return
    if not scale.is_integer() or int(scale) & (int(scale) - 1):
        t.refuse("global_parameter_scale", "must be a power of 2", is_essential=True)
        return
    each, rest = divmod(int(scale).bit_length() - 1, 3)
    heads, width = each + (rest > 0), each + (rest > 1)
    powers = {
        "base_emb_dim": width,
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
        "base_mlp_dim": heads,
        "base_num_decoder_layers": each,
    }
    scaled: dict[str, str] = {}
    for word, power in powers.items():
        number = t.number(word) if word in t else float(default_of(word))
        if number is None or not number.is_integer():
            t.refuse(word, "must be a whole number", is_essential=True)
            return
        scaled[word] = str(int(number) << power)
        if word in t:
            t.map(word, f"x {1 << power} by global_parameter_scale", **{word: scaled[word]})
    t.map("global_parameter_scale", **scaled)


def _no_family(t: Translation, word: str) -> None:
    block = t.text(word)
    others = f"; there are {', '.join(FAMILIES)}"
    if block in _FORMER:
        others = f", which maxbatch==0.5.0 still has; nearest: {_FORMER[block]}"
    t.refuse(word, f"there is no family {block}{others}", is_essential=True)


def _pattern(t: Translation, word: str) -> None:
    """Takes a block with a fixed pattern of windows, which attention_type does not state in
    MaxText.
    """
    block = t.text(word)
    t.map(word, decoder_block=block, attention_type=FAMILIES[block].attention.attention_type)


def _double_layers(t: Translation, _: str) -> None:
    layers = t.number("base_num_decoder_layers")
    pairs = float(t.settings.get("base_num_decoder_layers", "nan")) if layers is None else layers
    if pairs.is_integer():  # others are refused by the table of words
        why = "a layer there is two here, local and global"
        t.map("base_num_decoder_layers", why, base_num_decoder_layers=str(2 * int(pairs)))


def _activations(t: Translation, word: str) -> None:
    activations = _activation(t)
    if activations == "silu,linear":
        t.ignore(word, "the gated MLP of llama is the default")
    elif activations in _ACTIVATIONS:
        t.map(word, mlp_activations=activations)
    else:
        t.refuse(word, f"must be one of {' | '.join(_ACTIVATIONS)}", is_essential=True)


def _activation(t: Translation) -> str:
    return ",".join(re.findall(r"\w+", t.text("mlp_activations")))


def _is_original_length(t: Translation, _: str) -> bool:
    length, original = (
        t.number(word) for word in ("max_position_embeddings", "original_max_position_embeddings")
    )
    return length is not None and length <= (original or 4096)


def _is_cycle(t: Translation, word: str) -> bool:
    """Returns whether layers repeat after the stated number of them."""
    cycle, experts, unrotated = (
        int(t.number(name) or 1)
        for name in (word, "interleave_moe_layer_step", "nope_layer_interval")
    )
    return cycle % math.lcm(max(1, experts), max(1, unrotated)) == 0


def _has_scaled_queries(t: Translation, _: str) -> bool:
    """Returns whether the query weights hold 1 / sqrt(head_dim) there."""
    # a word with our name, which is mapped after the table's rows
    if t.text("use_qk_norm").lower() == "true":
        return False
    model = _model(t)
    if model is None or model.use_qk_norm:
        return False
    family = FAMILIES_OF_MAXTEXT.get(model.decoder_block)
    return family is not None and family.scales_query


def _scales_gemma(t: Translation, _: str) -> bool:
    """Returns whether the family is a Gemma, whose embedding and norms hold their factors there."""
    model = _model(t)
    return model is not None and FAMILIES[model.decoder_block].embedding.is_scaled


def _ties_logits(t: Translation, _: str) -> bool:
    """Returns whether logits are products with the embedding."""
    value, model = t.text("logits_via_embedding").lower(), _model(t)
    return value == "true" or (not value and model is not None and model.logits_via_embedding)


def _model(t: Translation) -> ModelConfig | None:
    """Returns the model's keys as far as its preset and its block state them; None if its name is
    known after the import only.
    """
    name = t.settings.get("model_name", "default")
    if name not in (*presets(), "default", "auto"):
        return None
    preset = [f"model_name={name}"] if name in presets() else []
    model = load_config(overrides=preset).model
    block = t.settings.get("decoder_block", t.text("decoder_block"))
    if block not in FAMILIES:
        block = model.decoder_block if preset else "llama2"
    return model.replaced({"decoder_block": block})


MODEL_RULES: Mapping[str, Rule] = {
    "dimensions": _dimensions,
    "no_family": _no_family,
    "pattern": _pattern,
    "double_layers": _double_layers,
    "activations": _activations,
}
MODEL_CONDITIONS: Mapping[str, Condition] = {
    "is_preset": is_preset,
    "has_scaled_queries": _has_scaled_queries,
    "scales_queries": lambda t, _: _has_scaled_queries(t, _) and "lora_rank" not in t.settings,
    "scales_gemma": _scales_gemma,
    "ties_logits": _ties_logits,
    "is_own": lambda t, _: not is_preset(t, _),
    "is_read": lambda t, word: t.is_read(word),
    "is_unread": lambda t, word: not t.is_read(word),
    "is_of_no_family": lambda t, word: t.text(word) not in (*_LLAMA_BLOCKS, "gpt3", *FAMILIES),
    "is_normalising": lambda t, _: t.text("decoder_block") in _NORMALISING,
    "is_sigmoid": lambda t, _: _activation(t) == "sigmoid,linear",
    "is_scaled": lambda t, _: t.text("rope_use_scale", "true").lower() != "false",
    "is_interleaved": lambda t, word: t.text(word, "true").lower() == "true",
    "is_cycle": _is_cycle,
    "is_e2b": lambda t, _: t.text("model_name") == "gemma4-e2b",
    "is_twice": lambda t, word: (
        t.number(word) == 2 * (t.number("head_dim") or float(default_of("head_dim")))
    ),
    "is_vocabulary": lambda t, word: t.number(word) == t.number("vocab_size"),
    "is_original_length": _is_original_length,
    "is_as_wide_as_keys": lambda t, word: (
        (t.number(word) or 128) == (t.number("gdn_key_head_dim") or 128)
    ),
}
