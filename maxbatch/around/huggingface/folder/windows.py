"""Layers that attend to a window, in a Hugging Face `config.json`: a function that reads their keys,
and one that writes their fields.
"""

from __future__ import annotations

from maxbatch.around.huggingface.folder.stated_model import StatedModel
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.forms.attention import GLOBAL, LOCAL, is_local_layer
from maxbatch.families.record import Family, Json

# Values of the field `layer_types`.
FULL, _WINDOW = "full_attention", "sliding_attention"
_TYPES = {_WINDOW: LOCAL, FULL: GLOBAL}


def read_windows(model: StatedModel) -> dict[str, object]:
    """Returns the keys of layers that attend to a window only."""
    window = model.get("sliding_window")
    if "use_sliding_window" in model.fields and not model["use_sliding_window"]:
        window = None
    has_windows = all(form.has_windows for form in model.family.attention_forms)
    types = layer_types(model) if window and has_windows else [GLOBAL]
    if LOCAL not in types:
        return {"attention_type": GLOBAL, "sliding_window_size": 0}
    return {"attention_type": ",".join(_shortest_cycle(types)), "sliding_window_size": window}


def write_windows(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of windows; none for a family without them."""
    local = is_local_layer(config.attention_type, config.base_num_decoder_layers)
    types = [_WINDOW if is_local else FULL for is_local in local]
    window = config.sliding_window_size if any(local) else None
    every = family.attention.local_every
    if every == 1:
        return {"sliding_window": window}
    if every:
        # The distance between global layers: older files state nothing else about them.
        pattern = types.index(FULL) + 1 if FULL in types else every
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


def layer_types(model: StatedModel) -> list[str]:
    """Returns whether each layer is local or global; one value where all are alike."""
    types, every = model.get("layer_types"), model.family.attention.local_every
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
