"""The rows of forms that few families have: for each form the config keys that a Hugging Face
`config.json` states, and where fields state them together, or layer by layer, a function that reads
them and one that writes them.
"""

from __future__ import annotations

from maxbatch.around.huggingface.folder.rows import Form, Row, flag, never, or_null, or_zero
from maxbatch.around.huggingface.folder.stated_model import StatedModel
from maxbatch.around.huggingface.folder.windows import FULL, layer_types
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.cycle import cycle_of
from maxbatch.families.deepseek import LATENTS
from maxbatch.families.forms.attention import GLOBAL, LOCAL
from maxbatch.families.forms.experts import moe_mlp_dim
from maxbatch.families.llama4 import ChunkedAttention
from maxbatch.families.matrices import global_head_dim
from maxbatch.families.qwen3_next import DELTA_RULE
from maxbatch.families.record import Family, Json

# Heads that only global layers have, inputs of layers, and last layers that share keys (Gemma 4).

_INPUT_WIDTH = "hidden_size_per_layer_input"


def read_global_heads(model: StatedModel) -> dict[str, object]:
    """Returns the keys of heads that only global layers have, stated for all of them or layer by
    layer (Gemma 4).
    """
    family, types = model.family, layer_types(model)
    required: dict[str, object] = {
        **family.told_by,
        "attention_k_eq_v": family.attention.shares_kv_projections,
    }
    if family.last_layers:
        required["vocab_size_per_layer_input"] = model["vocab_size"]
    else:
        required |= {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    for field, value in required.items():
        if (model.get(field) or 0) != value:
            raise model.refused(
                f"{field}={shown(str(model.get(field)))} is not supported for "
                f"{family.decoder_block}"
            )
    if types[-1:] == [LOCAL]:
        raise model.refused("layer_types: the last layer must be full_attention")

    head_dim = model["global_head_dim"]
    kv_heads = (
        model.get("num_global_key_value_heads") if family.attention.shares_kv_projections else None
    )
    if model.get("per_layer_config") is not None:
        head_dim, kv_heads = _heads_layer_by_layer(model, types)
    if head_dim != 2 * model["head_dim"]:
        raise model.refused(
            f"global_head_dim={head_dim} is not supported: heads of full_attention layers are "
            f"twice as wide as head_dim={model['head_dim']}"
        )
    return {"global_num_kv_heads": kv_heads or 0}


def _heads_layer_by_layer(model: StatedModel, types: list[str]) -> tuple[int, int]:
    """Returns the width of a global layer's head and the number of its keys, from the fields of
    each layer.
    """
    usual = {field: model[field] for field in ("head_dim", "num_key_value_heads")}
    by_layer = model["per_layer_config"]
    heads = [usual | (by_layer.get(str(layer)) or {}) for layer in range(model.num_layers)]
    of_global = next(
        (layer for layer, kind in zip(heads, types, strict=True) if kind == GLOBAL), usual
    )
    if any(
        layer != (of_global if kind == GLOBAL else usual)
        for layer, kind in zip(heads, types, strict=True)
    ):
        raise model.refused(
            "per_layer_config is not supported unless all full_attention layers, and they alone, "
            "have one head_dim and num_key_value_heads"
        )
    return of_global["head_dim"], of_global["num_key_value_heads"]


def write_global_heads(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of the heads of global layers, and of the small models' inputs of layers
    (Gemma 4).
    """
    return {
        "global_head_dim": global_head_dim(config),
        "num_global_key_value_heads": config.global_num_kv_heads or config.base_num_kv_heads,
        "attention_k_eq_v": family.attention.shares_kv_projections,
        "enable_moe_block": config.num_experts > 1,
        "vocab_size_per_layer_input": config.vocab_size,
    }


_GLOBAL_HEADS = Form(
    lambda family: family.attention.has_global_heads,
    (
        Row("num_kv_shared_layers", "num_kv_shared_layers", or_zero, default=None),
        Row(
            "use_double_wide_mlp",
            "use_double_wide_mlp",
            lambda flag, model: bool(model.get("num_kv_shared_layers")) and bool(flag),
            default=None,
        ),
        Row("query_pre_attn_scalar", "", lambda _, model: 1),
    ),
    read_global_heads,
    write_global_heads,
    whole=(
        "global_head_dim",
        "num_global_key_value_heads",
        _INPUT_WIDTH,
        "vocab_size_per_layer_input",
    ),
    of_layers=("num_kv_shared_layers",),
)

# One latent of keys and values, and a router with groups of experts (DeepSeek).


def read_latents(model: StatedModel) -> dict[str, object]:
    """Checks that every head has a key of its own, which the latents make (DeepSeek)."""
    heads, kv_heads = model.num_heads, model.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise model.refused(
            f"num_key_value_heads={kv_heads} is not supported: latents make a key of each of the "
            f"{heads} heads"
        )
    return {}


def write_latents(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of DeepSeek's form that no key here changes."""
    head_dim = config.qk_rope_head_dim  # of the part that transformers rotate
    return {"attention_bias": False, "num_nextn_predict_layers": 0, "head_dim": head_dim}


_LATENTS = Form(
    lambda family: LATENTS in family.forms,
    (
        Row("kv_lora_rank", "kv_lora_rank"),
        Row("qk_nope_head_dim", "qk_nope_head_dim"),
        Row("qk_rope_head_dim", "qk_rope_head_dim"),
        Row("v_head_dim", "v_head_dim"),
        Row("routed_scaling_factor", "routed_scaling_factor"),
        # no other key reads it in a model with latents
        Row("head_dim", "qk_rope_head_dim", is_written=never),
        Row("q_lora_rank", "q_lora_rank", or_zero, or_null),
        Row("shared_experts", "n_shared_experts", or_zero),
        Row("first_num_dense_layers", "first_k_dense_replace", or_zero),
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
    ),
    read_latents,
    write_latents,
    whole=(
        "n_shared_experts",
        "n_group",
        "topk_group",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
    of_layers=(
        "first_k_dense_replace",
        "num_nextn_predict_layers",
    ),
)


def _read_chosen_groups(chosen: int | None, groups: int) -> int:
    return (chosen or groups) if groups > 1 else -1


# The gated delta rule in the layers between those with attention (Qwen3-Next).

_STATES = "linear_attention"  # in `layer_types`


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


def read_delta_rule(model: StatedModel) -> dict[str, object]:
    """Returns the distance between layers with attention; the others have a gated delta rule
    (Qwen3-Next).
    """
    every = model.get("full_attention_interval") or 4
    types = _types_of_delta_rule(model.num_layers, every)
    if listed := model.get("layer_types"):
        types = listed
        every = types.index(FULL) + 1 if FULL in types else model.num_layers + 1
    if types != _types_of_delta_rule(model.num_layers, every):
        raise model.refused(
            f"layer_types: must have full_attention in every n-th layer and {_STATES} in the others"
        )
    return {"inhomogeneous_layer_cycle_interval": every}


def write_delta_rule(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields that state which layers have attention."""
    every = config.inhomogeneous_layer_cycle_interval
    return {
        "layer_types": _types_of_delta_rule(config.base_num_decoder_layers, every),
        "full_attention_interval": every,
    }


def _types_of_delta_rule(num_layers: int, every: int) -> list[str]:
    return [_STATES if (layer + 1) % every else FULL for layer in range(num_layers)]


_DELTA_RULE = Form(
    lambda family: DELTA_RULE in family.forms,
    (
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
    ),
    read_delta_rule,
    write_delta_rule,
    whole=(
        "shared_expert_intermediate_size",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    of_layers=("full_attention_interval",),
)


# Chunks, and layers between that rotate nothing or have no experts (Llama 4).

_CHUNK, _IN_CHUNKS = "attention_chunk_size", "chunked_attention"  # the latter in `layer_types`


def read_chunks(model: StatedModel) -> dict[str, object]:
    """Checks that layers with RoPE, and they alone, attend to chunks, if any do (Llama 4)."""
    chunk = model[_CHUNK]
    types = [
        _IN_CHUNKS if chunk and rotates else FULL
        for rotates in _rotating_layers(model)[: model.num_layers]
    ]
    if (model.get("layer_types") or types) != types:
        raise model.refused(
            "layer_types is not supported: layers with RoPE have chunks, if any have"
        )
    return {}


def write_chunks(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of Llama 4's form that repeat what a list of layers states."""
    num_layers, cycle = config.base_num_decoder_layers, cycle_of(config)
    forms = [cycle[layer % len(cycle)] for layer in range(num_layers)]
    every = config.nope_layer_interval
    return {
        "no_rope_layer_interval": every if every > 0 else num_layers + 1,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "layer_types": [_IN_CHUNKS if form.is_local else FULL for form in forms],
    }


def read_unrotated_layers(layers: list[int] | None, model: StatedModel) -> int:
    """Returns the distance between layers without RoPE; -1 if all have it."""
    return _period(model, "no_rope_layers", [not rotates for rotates in _rotating_layers(model)])


def write_unrotated_layers(every: int, config: DecoderConfig) -> list[int]:
    """Returns 1 for each layer with RoPE, and 0 for the others."""
    cycle = cycle_of(config)
    layers = range(config.base_num_decoder_layers)
    return [int(cycle[layer % len(cycle)].has_rope) for layer in layers]


def read_expert_layers(layers: list[int] | None, model: StatedModel) -> int:
    """Returns the distance between layers with experts; -1 if none has them."""
    every = model["interleave_moe_layer_step"]
    with_experts = range(every - 1, model.num_layers, every) if layers is None else layers
    flags = [layer in with_experts for layer in range(model.num_layers)]
    return _period(model, "moe_layers", flags)


def write_expert_layers(every: int, config: DecoderConfig) -> list[int]:
    """Returns the numbers of the layers with experts."""
    cycle = cycle_of(config)
    layers = range(config.base_num_decoder_layers)
    return [layer for layer in layers if cycle[layer % len(cycle)].has_experts]


def _rotating_layers(model: StatedModel) -> list[int]:
    """Returns whether each layer has RoPE."""
    every = model["no_rope_layer_interval"]
    return model.get("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(model.num_layers)
    ]


def _period(model: StatedModel, field: str, flags: list[bool]) -> int:
    """Returns n if the flag of every n-th layer alone is set; -1 if none is."""
    flags = flags[: model.num_layers]
    every = flags.index(True) + 1 if any(flags) else -1
    if len(flags) < model.num_layers or any(
        flag != (every > 0 and number % every == 0) for number, flag in enumerate(flags, 1)
    ):
        raise model.refused(f"{field} is not supported: it must name every n-th layer")
    return every


_CHUNKS = Form(
    lambda family: isinstance(family.attention, ChunkedAttention),
    (
        Row("base_mlp_dim", "intermediate_size_mlp"),
        # the row of base_mlp_dim above writes it
        Row("base_moe_mlp_dim", "intermediate_size", is_written=never),
        Row("shared_experts", "", lambda _, model: 1),
        Row("routed_score_func", "", lambda _, model: "sigmoid"),
        Row("use_qk_norm", "use_qk_norm", flag),
        Row("chunk_attn_window_size", _CHUNK, or_zero, or_null),
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
    ),
    read_chunks,
    write_chunks,
    whole=(
        "intermediate_size_mlp",
        _CHUNK,
    ),
    of_layers=(
        "interleave_moe_layer_step",
        "no_rope_layer_interval",
    ),
)

FORMS_OF_SOME = (_GLOBAL_HEADS, _LATENTS, _DELTA_RULE, _CHUNKS)
