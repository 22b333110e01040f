"""Config keys as the `config.json` of a Hugging Face model, in the format of transformers 4, which
5 reads too.
"""

from __future__ import annotations

from typing import Any

from maxbatch.around.huggingface.folder.config_json import ACTIVATIONS, ROPE_TYPES, model_keys
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.sections import KEYS
from maxbatch.config.values import value_text
from maxbatch.families.cycle import cycle_of
from maxbatch.families.family import FAMILIES, Family, Json, is_local_layer
from maxbatch.families.matrices import global_head_dim, moe_mlp_dim
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
# Latents have their own widths of keys and values.
_UNREAD_BY_LATENTS = ("head_dim", "base_num_kv_heads")


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
    has_rope = family.has_rope and not family.has_global_heads
    stated = _common(config) | family.fixed | _windows(config, family)
    stated |= _rope(config, family) if has_rope else {}
    stated["hidden_act"] = _activation(config, family)
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_projection_bias}
    stated |= {field: biases[field] for field in family.bias_fields}
    if family.has_experts and config.num_experts > 1:
        stated |= _experts(config, family)
    if family.has_global_heads:
        stated |= _global_heads(config, family)
    if family.has_latents:
        stated |= _latents(config)
    if "attention_chunk_size" in family.defaults:
        stated |= _chunks(config)
    if family.has_delta_rule:
        stated |= _delta_rule(config)
    if family.has_head_dim:
        stated["head_dim"] = config.qk_rope_head_dim if family.has_latents else config.head_dim
    if "query_pre_attn_scalar" in family.defaults:
        stated["query_pre_attn_scalar"] = _plain(config.query_pre_attn_scalar or config.head_dim)
    if family.has_soft_caps:
        caps = {"attn": config.attn_logits_soft_cap, "final": config.final_logits_soft_cap}
        stated |= {f"{which}_logit_softcapping": float(cap) or None for which, cap in caps.items()}
    kept = {field: source[field] for field in _KEPT if field in source}
    kept.setdefault("max_position_embeddings", config.max_target_length)
    if config.rope_type == "longrope":
        kept["original_max_position_embeddings"] = config.original_max_position_embeddings
        kept["max_position_embeddings"] = round(
            config.rope_factor * config.original_max_position_embeddings
        )
    if not family.has_rope:
        kept["max_position_embeddings"] = max(config.trainable_position_size, 1)
    written = {family.fields.get(field, field): value for field, value in (kept | stated).items()}
    written |= {"architectures": [family.architecture], "model_type": family.model_type}
    written |= {"torch_dtype": dtype, "use_cache": True}
    _check(config, family.model_type, written)
    return dict(sorted(written.items()))


def _common(config: DecoderConfig) -> Json:
    return {
        "hidden_size": config.base_emb_dim,
        "intermediate_size": config.base_mlp_dim,
        "num_hidden_layers": config.base_num_decoder_layers,
        "num_attention_heads": config.base_num_query_heads,
        "num_key_value_heads": config.base_num_kv_heads,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.logits_via_embedding,
        "rms_norm_eps": config.normalization_layer_epsilon,
    }


def _experts(config: DecoderConfig, family: Family) -> Json:
    stated: Json = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }
    width = moe_mlp_dim(config)
    stated["intermediate_size"] = config.base_mlp_dim
    if family.has_experts_beside_mlp:
        stated["moe_intermediate_size"] = width
    elif family.has_latents:
        stated |= {"moe_intermediate_size": width, "moe_layer_freq": 1}
    elif "moe_intermediate_size" in family.defaults:
        stated |= {"moe_intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        stated["intermediate_size"] = width
    if not family.always_normalises:
        stated["norm_topk_prob"] = config.norm_topk_prob
    return stated


def _chunks(config: DecoderConfig) -> Json:
    """Returns the fields of Llama 4's form."""
    layers, cycle = config.base_num_decoder_layers, cycle_of(config)
    forms = [cycle[layer % len(cycle)] for layer in range(layers)]
    return {
        "intermediate_size_mlp": config.base_mlp_dim,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "moe_layers": [layer for layer, form in enumerate(forms) if form.has_experts],
        "no_rope_layers": [int(form.has_rope) for form in forms],
        "no_rope_layer_interval": config.nope_layer_interval
        if config.nope_layer_interval > 0
        else layers + 1,
        "attention_chunk_size": config.chunk_attn_window_size or None,
        "layer_types": [
            "chunked_attention" if form.is_local else "full_attention" for form in forms
        ],
        "attn_temperature_tuning": config.temperature_tuning,
        "use_qk_norm": config.use_qk_norm,
    }


def _global_heads(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of Gemma 4's form: the heads of global layers, their RoPE, and what its
    small models have.
    """
    proportional = {
        "rope_type": "proportional",
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    base = config.local_rope_max_timescale
    local = {
        "rope_type": "default",
        "rope_theta": _plain(base if base > 0 else config.rope_max_timescale),
    }
    return {
        "global_head_dim": global_head_dim(config),
        "num_global_key_value_heads": config.global_num_kv_heads or config.base_num_kv_heads,
        "attention_k_eq_v": family.shares_kv_projections,
        "rope_parameters": {
            "full_attention": proportional | {"rope_theta": _plain(config.rope_max_timescale)},
            "sliding_attention": local,
        },
        "enable_moe_block": config.num_experts > 1,
        "hidden_size_per_layer_input": family.layer_input_width,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.use_double_wide_mlp,
    }


def _latents(config: DecoderConfig) -> Json:
    """Returns the fields of DeepSeek's form."""
    names = (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "routed_scaling_factor",
    )
    groups = max(1, config.n_routing_groups)
    return {
        **{name: config[name] for name in names},
        "num_key_value_heads": config.base_num_query_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "n_shared_experts": config.shared_experts,
        "first_k_dense_replace": config.first_num_dense_layers,
        "n_group": groups,
        "topk_group": groups if config.topk_routing_group == -1 else config.topk_routing_group,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }


def _delta_rule(config: DecoderConfig) -> Json:
    """Returns the fields of a family whose layers have a gated delta rule, and every n-th one
    attention.
    """
    every = config.inhomogeneous_layer_cycle_interval
    return {
        "layer_types": [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config.base_num_decoder_layers)
        ],
        "full_attention_interval": every,
        "shared_expert_intermediate_size": config.shared_experts * moe_mlp_dim(config),
        "linear_key_head_dim": config.gdn_key_head_dim,
        "linear_value_head_dim": config.gdn_key_head_dim,
        "linear_num_key_heads": config.gdn_num_key_heads,
        "linear_num_value_heads": config.gdn_num_value_heads,
        "partial_rotary_factor": config.partial_rotary_factor,
    }


def _activation(config: DecoderConfig, family: Family) -> str:
    """Returns the family's own name of an activation, if it has one."""
    ours = config.mlp_activations.partition(",")[0]
    usual: str = family.defaults.get("hidden_act", "silu")
    return (
        usual
        if ACTIVATIONS[usual] == ours
        else next(name for name in ACTIVATIONS if ACTIVATIONS[name] == ours)
    )


def _windows(config: DecoderConfig, family: Family) -> Json:
    local = is_local_layer(config.attention_type, config.base_num_decoder_layers)
    types = ["sliding_attention" if is_local else "full_attention" for is_local in local]
    window = config.sliding_window_size if any(local) else None
    if family.local_every == 1:
        return {"sliding_window": window}
    if family.local_every:
        return {
            "sliding_window": window,
            "layer_types": types,
            "sliding_window_pattern": _pattern(types, family),
        }
    if family.has_max_window_layers:
        first = local.index(True) if any(local) else len(local)
        return {
            "use_sliding_window": any(local),
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": types,
        }
    return {}


def _pattern(types: list[str], family: Family) -> int:
    """Returns the distance between global layers; older files state nothing else about them."""
    return types.index("full_attention") + 1 if "full_attention" in types else family.local_every


def _rope(config: DecoderConfig, family: Family) -> Json:
    stated: Json = {"rope_theta": _plain(config.rope_max_timescale), "rope_scaling": None}
    if "rope_local_base_freq" in family.defaults:
        base = config.local_rope_max_timescale
        stated["rope_local_base_freq"] = _plain(base if base > 0 else config.rope_max_timescale)
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == config.rope_type)
    if kind == "default":
        return stated
    if kind == "longrope":
        # Only these names: the Phi-3 of transformers 4 accepts no others.
        return stated | {"rope_scaling": {"type": kind, **_long_factors(config)}}
    scaling: Json = {"rope_type": kind, "factor": config.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = config.original_max_position_embeddings
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
        }
    if kind == "yarn":
        scaling |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow}
        scaling |= {} if config.rope_truncate else {"truncate": False}
        if family.has_latents and config.mscale:
            scaling["mscale_all_dim"] = config.mscale
        if family.has_latents and config.mscale and config.rope_attention_factor == 1:
            scaling["mscale"] = config.mscale  # the ratio of both is that factor
        elif config.rope_attention_factor:
            scaling["attention_factor"] = config.rope_attention_factor
    return stated | {"rope_scaling": scaling}


def _long_factors(config: DecoderConfig) -> Json:
    texts = {"short_factor": config.rope_short_factors, "long_factor": config.rope_long_factors}
    factors: Json = {
        name: [float(word) for word in text.split(",")] for name, text in texts.items()
    }
    return factors | (
        {"attention_factor": config.rope_attention_factor} if config.rope_attention_factor else {}
    )


def _plain(number: float) -> int | float:
    return int(number) if float(number).is_integer() else number


def _check(config: DecoderConfig, name: str, written: Json) -> None:
    """Raises ConfigError unless the written fields read back as the config's own keys."""
    read = {key: KEYS[key].read(text) for key, text in model_keys(written, name).items()}
    read = {key: KEYS[key].default_value for key in _ABSENT} | read
    for key in read:
        ours: Any = config[key]
        value: Any = read[key]
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
        if FAMILIES[config.decoder_block].has_latents:
            if key in _UNREAD_BY_LATENTS or (key == "mscale" and config.rope_type != "yarn"):
                continue
            if key in ("n_routing_groups", "topk_routing_group") and config.n_routing_groups <= 1:
                continue
            if key == "topk_routing_group" and ours == -1:
                ours = config.n_routing_groups
        if (
            key in ("base_moe_mlp_dim", "base_mlp_dim")
            and FAMILIES[config.decoder_block].has_experts
        ):
            continue  # one width is stated; the other one is the same or not used
        if key == "sliding_window_size" and not any(
            is_local_layer(config.attention_type, config.base_num_decoder_layers)
        ):
            continue
        if ours != value:
            raise ConfigError(
                f"{key}={value_text(config[key])}: Hugging Face's {name} cannot express it; "
                "works: a decoder_block whose family can"
            )
