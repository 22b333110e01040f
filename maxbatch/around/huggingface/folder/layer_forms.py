"""The fields of a Hugging Face `config.json` that state layer by layer, or several together: for
each form of layers a function that reads its keys, and one that writes its fields.
"""

from __future__ import annotations

from maxbatch.around.huggingface.folder.stated_model import INPUT_WIDTH, StatedModel
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.cycle import cycle_of
from maxbatch.families.family import GLOBAL, LOCAL, Family, Json, is_local_layer
from maxbatch.families.matrices import global_head_dim

CHUNK = "attention_chunk_size"  # a field of Llama 4's form
# Values of the field `layer_types`.
_ATTENTION, _WINDOW, _CHUNKS, _DELTA_RULE = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)
_TYPES = {_WINDOW: LOCAL, _ATTENTION: GLOBAL}


def read_windows(model: StatedModel) -> dict[str, object]:
    """Returns the keys of layers that attend to a window only."""
    window = model.get("sliding_window")
    if "use_sliding_window" in model.fields and not model["use_sliding_window"]:
        window = None
    has_windows = all(form.has_windows for form in model.family.attention_forms)
    types = _layer_types(model) if window and has_windows else [GLOBAL]
    if LOCAL not in types:
        return {"attention_type": GLOBAL, "sliding_window_size": 0}
    return {"attention_type": ",".join(_shortest_cycle(types)), "sliding_window_size": window}


def write_windows(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of windows; none for a family without them."""
    local = is_local_layer(config.attention_type, config.base_num_decoder_layers)
    types = [_WINDOW if is_local else _ATTENTION for is_local in local]
    window = config.sliding_window_size if any(local) else None
    if family.local_every == 1:
        return {"sliding_window": window}
    if family.local_every:
        # The distance between global layers: older files state nothing else about them.
        pattern = types.index(_ATTENTION) + 1 if _ATTENTION in types else family.local_every
        return {"sliding_window": window, "layer_types": types, "sliding_window_pattern": pattern}
    if family.has_max_window_layers:
        first = local.index(True) if any(local) else len(local)
        return {
            "use_sliding_window": any(local),
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": types,
        }
    return {}


def _layer_types(model: StatedModel) -> list[str]:
    """Returns whether each layer is local or global; one value where all are alike."""
    types, every = model.get("layer_types"), model.family.local_every
    if types:
        if unknown := [name for name in types if name not in _TYPES]:
            raise model.refused(f"layer_types={shown(str(unknown[0]))} is not supported")
        return [_TYPES[name] for name in types]
    if every == 1:
        return [LOCAL]
    if every:
        every = model.get("sliding_window_pattern") or model.get("_sliding_window_pattern") or every
        return [LOCAL if (layer + 1) % every else GLOBAL for layer in range(model.num_layers)]
    if model.get("use_sliding_window"):
        first = model.get("max_window_layers", 28)
        return [LOCAL if layer >= first else GLOBAL for layer in range(model.num_layers)]
    return [GLOBAL]


def _shortest_cycle(types: list[str]) -> list[str]:
    """Returns the shortest pattern that repeats to the types of all layers."""
    lengths = (
        length
        for length in range(1, len(types))
        if all(kind == types[layer % length] for layer, kind in enumerate(types))
    )
    return types[: next(lengths, len(types))]


def read_global_heads(model: StatedModel) -> dict[str, object]:
    """Returns the keys of heads that only global layers have, stated for all of them or layer by
    layer (Gemma 4).
    """
    family, types = model.family, _layer_types(model)
    required: dict[str, object] = {
        INPUT_WIDTH: family.layer_input_width,
        "attention_k_eq_v": family.attention.shares_kv_projections,
    }
    if family.layer_input_width:
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
        INPUT_WIDTH: family.layer_input_width,
        "vocab_size_per_layer_input": config.vocab_size,
    }


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
    return {"attention_bias": False, "num_nextn_predict_layers": 0}


def read_chunks(model: StatedModel) -> dict[str, object]:
    """Checks that layers with RoPE, and they alone, attend to chunks, if any do (Llama 4)."""
    chunk = model[CHUNK]
    types = [
        _CHUNKS if chunk and rotates else _ATTENTION
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
        "layer_types": [_CHUNKS if form.is_local else _ATTENTION for form in forms],
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


def read_delta_rule(model: StatedModel) -> dict[str, object]:
    """Returns the distance between layers with attention; the others have a gated delta rule
    (Qwen3-Next).
    """
    every = model.get("full_attention_interval") or 4
    types = _types_of_delta_rule(model.num_layers, every)
    if listed := model.get("layer_types"):
        types = listed
        every = types.index(_ATTENTION) + 1 if _ATTENTION in types else model.num_layers + 1
    if types != _types_of_delta_rule(model.num_layers, every):
        raise model.refused(
            f"layer_types: must have full_attention in every n-th layer and {_DELTA_RULE} in the "
            "others"
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
    return [_DELTA_RULE if (layer + 1) % every else _ATTENTION for layer in range(num_layers)]
