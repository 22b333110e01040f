"""The config keys that a Hugging Face `config.json` states: one table, by which an import reads
them and an export writes them.

A form of models has rows, a key and a field each, and where fields state keys together a pair of
functions besides (`layer_forms`, `rope`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from maxbatch.around.huggingface.folder.layer_forms import (
    CHUNK,
    read_chunks,
    read_delta_rule,
    read_expert_layers,
    read_global_heads,
    read_latents,
    read_unrotated_layers,
    read_windows,
    write_chunks,
    write_delta_rule,
    write_expert_layers,
    write_global_heads,
    write_latents,
    write_unrotated_layers,
    write_windows,
)
from maxbatch.around.huggingface.folder.rope import plain, read_rope, write_rope
from maxbatch.around.huggingface.folder.stated_model import StatedModel, has_expert_width
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.family import FAMILIES, Family, Json
from maxbatch.families.matrices import moe_mlp_dim

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
}
_GATED, _PLAIN = ("silu", "gelu", "gelu_exact"), ("gelu", "gelu_exact")
_REQUIRED = object()


def _same(value: Any, _: object) -> object:
    return value


def _always(family: Family) -> bool:
    return True


def _never(family: Family) -> bool:
    return False


class Row(NamedTuple):
    """A config key, and the field that states it."""

    key: str
    field: str  # its common name; `Family.fields` has a family's own. "": the family states it
    to_key: Callable[[Any, StatedModel], object] = _same  # of the field's value
    to_field: Callable[[Any, DecoderConfig], object] = _same  # of the key's value
    default: object = _REQUIRED  # of a field that neither the file nor the family states
    # whether a file of the family has the field; an import reads it wherever it stands
    is_written: Callable[[Family], bool] = _always

    def read(self, model: StatedModel) -> object:
        """Returns the value of the key; raises KeyError if the file lacks a required field."""
        if not self.field:
            value = None
        elif self.default is _REQUIRED:
            value = model[self.field]
        else:
            value = model.get(self.field, self.default)
        return self.to_key(value, model)


class Form(NamedTuple):
    """The keys and fields of the models that have one form."""

    has_form: Callable[[Family], bool]
    rows: tuple[Row, ...] = ()
    # Keys that several fields state together; they come before those of the rows.
    read: Callable[[StatedModel], dict[str, object]] = lambda model: {}
    write: Callable[[DecoderConfig, Family], Json] = lambda config, family: {}
    # Conditions on a model of such a family.
    is_in_file: Callable[[StatedModel], bool] = lambda model: True
    is_in_config: Callable[[DecoderConfig], bool] = lambda config: True

    def keys(self, model: StatedModel) -> dict[str, object]:
        """Returns the keys that a file states; none if its model has another form."""
        if not (self.has_form(model.family) and self.is_in_file(model)):
            return {}
        return self.read(model) | {row.key: row.read(model) for row in self.rows}

    def fields(self, config: DecoderConfig, family: Family) -> Json:
        """Returns the fields of a model by their common names; none if it has another form."""
        if not (self.has_form(family) and self.is_in_config(config)):
            return {}
        rows = (row for row in self.rows if row.field and row.is_written(family))
        fields = {row.field: row.to_field(config[row.key], config) for row in rows}
        return fields | self.write(config, family)


def _of_family(value: Callable[[Family], object]) -> Callable[[Any, StatedModel], object]:
    """Returns a conversion of no field: the value that all models of a family have."""
    return lambda _, model: value(model.family)


def _flag(value: object, _: object) -> bool:
    return bool(value)


def _or_zero(value: Any, _: object) -> object:
    return value or 0


def _or_null(value: Any, _: object) -> object:
    return value or None


def _family(config: DecoderConfig) -> Family:
    return FAMILIES[config.decoder_block]


def _states(field: str) -> Callable[[Family], bool]:
    """Returns a condition: the fields of the family's biases include this one."""
    return lambda family: field in family.bias_fields


def _read_head_dim(width: int | None, model: StatedModel) -> int:
    has_own = model.family.has_head_dim
    return (width if has_own else None) or model.width // model.num_heads


def _write_head_dim(width: int, config: DecoderConfig) -> int:
    return config.qk_rope_head_dim if "qk_rope_head_dim" in _family(config).own_keys else width


def _write_kv_heads(heads: int, config: DecoderConfig) -> int:
    # a form that does not group heads makes a key of each
    groups = _family(config).attention.groups_heads
    return heads if groups else config.base_num_query_heads


def _read_mlp_dim(width: int | None, model: StatedModel) -> int:
    if width is None and not model.family.has_rope:
        return 4 * model.width  # GPT-2's default
    inner_width: int = model["intermediate_size"]
    return inner_width


def _write_mlp_dim(width: int, config: DecoderConfig) -> int:
    family = _family(config)
    is_of_experts = family.has_experts and config.num_experts > 1 and not has_expert_width(family)
    return moe_mlp_dim(config) if is_of_experts else width


def _read_activation(name: str | None, model: StatedModel) -> str:
    family, name = model.family, name or "silu"
    ours = ACTIVATIONS.get(family.activations.get(name, name))
    if ours is None or ours not in (_GATED if family.is_gated else _PLAIN):
        field = family.fields.get("hidden_act", "hidden_act")
        raise model.refused(
            f"{field}={shown(str(name))} is not supported for {family.decoder_block}"
        )
    return f"{ours},linear" if family.is_gated else ours


def _write_activation(activations: str, config: DecoderConfig) -> str:
    """Returns the family's usual name of an activation, or else the first one."""
    ours = activations.partition(",")[0]
    usual: str = _family(config).defaults.get("hidden_act", "silu")
    if ACTIVATIONS[usual] == ours:
        return usual
    return next(name for name in ACTIVATIONS if ACTIVATIONS[name] == ours)


def _read_cap(cap: float | None, model: StatedModel) -> float:
    return (cap or 0) if model.family.has_soft_caps else 0


def _write_cap(cap: float, _: DecoderConfig) -> float | None:
    return float(cap) or None


def _has_soft_caps(family: Family) -> bool:
    return family.has_soft_caps


COMMON = (
    Row("decoder_block", "", _of_family(lambda family: family.decoder_block)),
    Row("base_emb_dim", "hidden_size"),
    Row("base_num_query_heads", "num_attention_heads"),
    Row(
        "base_num_kv_heads",
        "num_key_value_heads",
        lambda heads, model: heads or model.num_heads,
        _write_kv_heads,
        default=None,
    ),
    Row(
        "head_dim",
        "head_dim",
        _read_head_dim,
        _write_head_dim,
        default=None,
        is_written=lambda family: family.has_head_dim,
    ),
    Row("base_mlp_dim", "intermediate_size", _read_mlp_dim, _write_mlp_dim, default=None),
    Row("base_num_decoder_layers", "num_hidden_layers"),
    Row("vocab_size", "vocab_size"),
    Row("logits_via_embedding", "tie_word_embeddings", _flag, default=None),
    Row("normalization_layer_epsilon", "rms_norm_eps", default=1e-6),
    Row("mlp_activations", "hidden_act", _read_activation, _write_activation, default=None),
    Row(
        "attention_bias",
        "attention_bias",
        lambda bias, model: model.family.has_attention_bias or bool(bias),
        default=None,
        is_written=_states("attention_bias"),
    ),
    # by the same field, which the row above writes
    Row("attention_out_bias", "attention_bias", _flag, default=None, is_written=_never),
    Row("mlp_projection_bias", "mlp_bias", _flag, default=None, is_written=_states("mlp_bias")),
    Row("use_qk_norm", "", _of_family(lambda family: family.has_qk_norm)),
    Row(
        "attn_logits_soft_cap",
        "attn_logit_softcapping",
        _read_cap,
        _write_cap,
        default=None,
        is_written=_has_soft_caps,
    ),
    Row(
        "final_logits_soft_cap",
        "final_logit_softcapping",
        _read_cap,
        _write_cap,
        default=None,
        is_written=_has_soft_caps,
    ),
    Row(
        "query_pre_attn_scalar",
        "query_pre_attn_scalar",
        to_field=lambda scalar, config: plain(scalar or config.head_dim),
        default=None,
        is_written=lambda family: "query_pre_attn_scalar" in family.defaults,
    ),
)
# The weights of balance are those that training states.
EXPERTS = (
    Row("num_experts", "num_experts"),
    Row("num_experts_per_tok", "num_experts_per_tok"),
    Row(
        "base_moe_mlp_dim",
        "moe_intermediate_size",
        lambda width, _: -1 if width is None else width,
        lambda _, config: moe_mlp_dim(config),
        default=None,
        is_written=has_expert_width,
    ),
    Row(
        "norm_topk_prob",
        "norm_topk_prob",
        lambda flag, model: model.family.always_normalises or bool(flag),
        default=None,
        is_written=lambda family: not family.always_normalises,
    ),
)
# Gemma 4's form.
GLOBAL_HEADS = (
    Row("num_kv_shared_layers", "num_kv_shared_layers", _or_zero, default=None),
    Row(
        "use_double_wide_mlp",
        "use_double_wide_mlp",
        lambda flag, model: bool(model.get("num_kv_shared_layers")) and bool(flag),
        default=None,
    ),
    Row("query_pre_attn_scalar", "", lambda _, model: 1),
)
# DeepSeek's form.
LATENTS = (
    Row("kv_lora_rank", "kv_lora_rank"),
    Row("qk_nope_head_dim", "qk_nope_head_dim"),
    Row("qk_rope_head_dim", "qk_rope_head_dim"),
    Row("v_head_dim", "v_head_dim"),
    Row("routed_scaling_factor", "routed_scaling_factor"),
    # no other key reads it in a model with latents
    Row("head_dim", "qk_rope_head_dim", is_written=_never),
    Row("q_lora_rank", "q_lora_rank", _or_zero, _or_null),
    Row("shared_experts", "n_shared_experts", _or_zero),
    Row("first_num_dense_layers", "first_k_dense_replace", _or_zero),
    Row(
        "n_routing_groups",
        "n_group",
        lambda groups, _: groups if (groups or 1) > 1 else -1,
        lambda groups, _: max(1, groups),
    ),
    Row(
        "topk_routing_group",
        "topk_group",
        lambda chosen, model: _read_chosen_groups(chosen, model["n_group"] or 1),
        lambda chosen, config: max(1, config.n_routing_groups) if chosen == -1 else chosen,
    ),
    Row("routed_score_func", "", lambda _, model: "sigmoid"),
    Row("routed_bias", "", lambda _, model: True),
)


def _read_chosen_groups(chosen: int | None, groups: int) -> int:
    return (chosen or groups) if groups > 1 else -1


def _read_shared_experts(width: int | None, model: StatedModel) -> int:
    """Returns the number of shared experts: the stated width over that of one expert."""
    of_one, width = model["moe_intermediate_size"], width or 0
    if width % of_one:
        raise model.refused(
            f"shared_expert_intermediate_size={width} is not supported: must be a multiple of "
            f"moe_intermediate_size={of_one}"
        )
    number: int = width // of_one
    return number


def _read_value_dim(width: int, model: StatedModel) -> int:
    of_keys: int = model["linear_key_head_dim"]
    if width != of_keys:
        raise model.refused(
            f"linear_value_head_dim={width} is not supported: values are as wide as keys, "
            f"linear_key_head_dim={of_keys}"
        )
    return of_keys


# Qwen3-Next's form.
DELTA_RULE = (
    Row(
        "shared_experts",
        "shared_expert_intermediate_size",
        _read_shared_experts,
        lambda number, config: number * moe_mlp_dim(config),
    ),
    Row("gdn_num_key_heads", "linear_num_key_heads"),
    Row("gdn_num_value_heads", "linear_num_value_heads"),
    Row("gdn_key_head_dim", "linear_key_head_dim"),
    Row("gdn_key_head_dim", "linear_value_head_dim", _read_value_dim),
)
# Llama 4's form.
CHUNKS = (
    Row("base_mlp_dim", "intermediate_size_mlp"),
    # the row of base_mlp_dim above writes it
    Row("base_moe_mlp_dim", "intermediate_size", is_written=_never),
    Row("shared_experts", "", lambda _, model: 1),
    Row("routed_score_func", "", lambda _, model: "sigmoid"),
    Row("use_qk_norm", "use_qk_norm", _flag),
    Row("chunk_attn_window_size", CHUNK, _or_zero, _or_null),
    Row(
        "nope_layer_interval",
        "no_rope_layers",
        read_unrotated_layers,
        write_unrotated_layers,
        default=None,
    ),
    Row(
        "interleave_moe_layer_step",
        "moe_layers",
        read_expert_layers,
        write_expert_layers,
        default=None,
    ),
    Row(
        "temperature_tuning",
        "attn_temperature_tuning",
        # only layers without RoPE have it
        lambda flag, model: bool(flag) and read_unrotated_layers(None, model) != -1,
    ),
)
POSITIONS = (
    Row(
        "trainable_position_size",
        "max_position_embeddings",
        lambda number, _: number or 1024,
        lambda number, _: max(number, 1),
        default=None,
    ),
)


def _states_experts(model: StatedModel) -> bool:
    """Returns whether a file states experts; in a family that has them beside the MLP a flag may
    turn them off.
    """
    return not model.family.has_experts_beside_mlp or bool(model.get("enable_moe_block"))


# In the order of an import: a later form's key replaces an earlier one's.
FORMS = (
    Form(_always, COMMON),
    Form(
        lambda family: family.has_experts,
        EXPERTS,
        is_in_file=_states_experts,
        is_in_config=lambda config: config.num_experts > 1,
    ),
    Form(
        lambda family: family.attention.has_global_heads,
        GLOBAL_HEADS,
        read_global_heads,
        write_global_heads,
    ),
    Form(lambda family: "kv_lora_rank" in family.own_keys, LATENTS, read_latents, write_latents),
    Form(
        lambda family: "gdn_num_key_heads" in family.own_keys,
        DELTA_RULE,
        read_delta_rule,
        write_delta_rule,
    ),
    Form(_always, read=read_windows, write=write_windows),
    Form(lambda family: CHUNK in family.defaults, CHUNKS, read_chunks, write_chunks),
    Form(lambda family: family.has_rope, read=read_rope, write=write_rope),
    Form(lambda family: not family.has_rope, POSITIONS),
)
