"""The config keys that a Hugging Face `config.json` states: one table, by which an import reads
them and an export writes them.

A form of models has rows, a key and a field each, and where fields state keys together a pair of
functions besides (`form_rows`, `windows`, `rope`).
"""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.around.huggingface.folder.fields import MOST, MOST_LAYERS
from maxbatch.around.huggingface.folder.form_rows import FORMS_OF_SOME
from maxbatch.around.huggingface.folder.rope import plain, read_rope, write_rope
from maxbatch.around.huggingface.folder.rows import Form, Row, always, flag, never, of_family
from maxbatch.around.huggingface.folder.stated_model import StatedModel, has_expert_width
from maxbatch.around.huggingface.folder.windows import read_windows, write_windows
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.experts import moe_mlp_dim
from maxbatch.families.record import Family

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
}
_GATED, _PLAIN = ("silu", "gelu", "gelu_exact"), ("gelu", "gelu_exact")


def _family(config: DecoderConfig) -> Family:
    return FAMILIES[config.decoder_block]


def _states(field: str) -> Callable[[Family], bool]:
    """Returns a condition: the fields of the family's biases include this one."""
    return lambda family: field in family.bias_fields


def _read_head_dim(width: int | None, model: StatedModel) -> int:
    has_own = model.family.has_head_dim
    return (width if has_own else None) or model.width // model.num_heads


def _write_kv_heads(heads: int, config: DecoderConfig) -> int:
    # a form that does not group heads makes a key of each
    groups = _family(config).attention.groups_heads
    return heads if groups else config.base_num_query_heads


def _read_mlp_dim(width: int | None, model: StatedModel) -> int:
    if width is None and not model.family.attention.has_rope:
        return 4 * model.width  # GPT-2's default
    inner_width: int = model["intermediate_size"]
    return inner_width


def _write_mlp_dim(width: int, config: DecoderConfig) -> int:
    family = _family(config)
    has_experts = family.experts is not None and config.num_experts > 1
    is_of_experts = has_experts and not has_expert_width(family)
    return moe_mlp_dim(config) if is_of_experts else width


def _read_activation(name: str | None, model: StatedModel) -> str:
    family, name = model.family, name or "silu"
    ours = ACTIVATIONS.get(family.activations.get(name, name))
    if ours is None or ours not in (_GATED if family.mlp.has_gate else _PLAIN):
        field = family.fields.get("hidden_act", "hidden_act")
        raise model.refused(
            f"{field}={shown(str(name))} is not supported for {family.decoder_block}"
        )
    return f"{ours},linear" if family.mlp.has_gate else ours


def _write_activation(activations: str, config: DecoderConfig) -> str:
    """Returns the family's usual name of an activation, or else the first one."""
    ours = activations.partition(",")[0]
    usual: str = _family(config).defaults.get("hidden_act", "silu")
    if ACTIVATIONS[usual] == ours:
        return usual
    return next(name for name in ACTIVATIONS if ACTIVATIONS[name] == ours)


def _always_normalise(family: Family) -> bool:
    return family.experts is not None and family.experts.always_normalise


def _caps_scores(family: Family) -> bool:
    return family.attention.caps_scores


def _caps_logits(family: Family) -> bool:
    return family.embedding.caps_logits


def _read_cap(has_cap: Callable[[Family], bool]) -> Callable[[float | None, StatedModel], float]:
    """Returns a conversion of a field that only families with this cap heed."""
    return lambda cap, model: (cap or 0) if has_cap(model.family) else 0


def _write_cap(cap: float, _: DecoderConfig) -> float | None:
    return float(cap) or None


COMMON = (
    Row("decoder_block", "", of_family(lambda family: family.decoder_block)),
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
        default=None,
        is_written=lambda family: family.has_head_dim,
    ),
    Row("base_mlp_dim", "intermediate_size", _read_mlp_dim, _write_mlp_dim, default=None),
    Row("base_num_decoder_layers", "num_hidden_layers"),
    Row("vocab_size", "vocab_size"),
    Row("logits_via_embedding", "tie_word_embeddings", flag, default=None),
    Row("normalization_layer_epsilon", "rms_norm_eps", default=1e-6),
    Row("mlp_activations", "hidden_act", _read_activation, _write_activation, default=None),
    Row(
        "attention_bias",
        "attention_bias",
        lambda bias, model: model.family.attention.has_input_biases or bool(bias),
        default=None,
        is_written=_states("attention_bias"),
    ),
    # by the same field, which the row above writes
    Row("attention_out_bias", "attention_bias", flag, default=None, is_written=never),
    Row("mlp_projection_bias", "mlp_bias", flag, default=None, is_written=_states("mlp_bias")),
    Row("use_qk_norm", "", of_family(lambda family: family.attention.has_qk_norm)),
    Row(
        "attn_logits_soft_cap",
        "attn_logit_softcapping",
        _read_cap(_caps_scores),
        _write_cap,
        default=None,
        is_written=_caps_scores,
    ),
    Row(
        "final_logits_soft_cap",
        "final_logit_softcapping",
        _read_cap(_caps_logits),
        _write_cap,
        default=None,
        is_written=_caps_logits,
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
        lambda flag, model: _always_normalise(model.family) or bool(flag),
        default=None,
        is_written=lambda family: not _always_normalise(family),
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
    experts = model.family.experts
    is_beside = experts is not None and experts.are_beside_mlp
    return not is_beside or bool(model.get("enable_moe_block"))


# In the order of an import: a later form's key replaces an earlier one's.
FORMS = (
    Form(always, COMMON),
    Form(
        lambda family: family.experts is not None,
        EXPERTS,
        is_in_file=_states_experts,
        is_in_config=lambda config: config.num_experts > 1,
    ),
    *FORMS_OF_SOME,
    Form(always, read=read_windows, write=write_windows),
    Form(lambda family: family.attention.has_rope, read=read_rope, write=write_rope),
    Form(lambda family: not family.attention.has_rope, POSITIONS),
)
# The largest value of each whole number of a form that few families have.
MOST_OF_FORMS = {
    **{field: MOST for form in FORMS for field in form.whole},
    **{field: MOST_LAYERS for form in FORMS for field in form.of_layers},
}
