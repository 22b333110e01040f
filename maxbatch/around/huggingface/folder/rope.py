"""RoPE in a Hugging Face `config.json`: a function that reads the keys of each form, and one that
writes its fields.

Two forms of the file state it: `rope_parameters` (transformers 5), and `rope_theta` with
`rope_scaling` (transformers 4, and what is written here).
"""

from __future__ import annotations

import math

from maxbatch.around.huggingface.folder.stated_model import StatedModel, states_rotated_part
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.record import Family, Json

ROPE_TYPES = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3.1",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def read_rope(model: StatedModel) -> dict[str, object]:
    """Returns the keys of RoPE, by `rope_parameters` or by the fields of transformers 4."""
    family = model.family
    if family.attention.has_global_heads:
        return _read_rope_of_global_heads(model)

    rope = dict(model.get("rope_parameters") or {})
    local_base = model.get("rope_local_base_freq")
    if "full_attention" in rope or "sliding_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise model.refused(
                f"rope_type={shown(str(local['rope_type']))} is not supported for sliding_attention"
            )
        local_base = local.get("rope_theta", local_base)
        rope = dict(rope.get("full_attention") or {})
    rope = (
        {"rope_theta": model.get("rope_theta") or 10000.0}
        | dict(model.get("rope_scaling") or {})
        | rope
    )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        works = ", ".join(ROPE_TYPES)
        raise model.refused(f"rope_type={shown(str(kind))} is not supported; works: one of {works}")
    fixed: dict[str, object] = {} if states_rotated_part(family) else {"partial_rotary_factor": 1}
    fixed |= {} if "mscale" in family.own_keys else {"mscale": None}
    for field, only in fixed.items():
        if rope.get(field, only) not in (only, None):
            raise model.refused(f"{field}={shown(str(rope[field]))} is not supported")

    keys = {"rope_max_timescale": rope["rope_theta"], "rope_type": ROPE_TYPES[kind]}
    if states_rotated_part(family):
        keys["partial_rotary_factor"] = rope.get(
            "partial_rotary_factor", model["partial_rotary_factor"]
        )
    if family.attention.local_every and local_base:
        keys["local_rope_max_timescale"] = local_base
    originals = (
        rope.get("original_max_position_embeddings"),
        model.get("original_max_position_embeddings"),
    )
    original = next(filter(None, originals), model.get("max_position_embeddings"))
    if ROPE_TYPES[kind] == "longrope":
        keys |= _read_long_rope(model, rope, original or model["original_max_position_embeddings"])
    elif kind != "default":
        keys["rope_factor"] = rope["factor"]
    if ROPE_TYPES[kind] in ("llama3.1", "yarn", "longrope") and original:
        keys["original_max_position_embeddings"] = original
    if kind == "llama3":
        keys |= {
            "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
        }
    if kind == "yarn":
        keys |= _read_yarn(rope)
    if "mscale" in family.own_keys:
        keys |= _read_two_scales(rope, kind == "yarn")
    return keys


def write_rope(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields of RoPE, in the form of transformers 4."""
    if family.attention.has_global_heads:
        return _write_rope_of_global_heads(config)

    fields: Json = {"rope_theta": plain(config.rope_max_timescale), "rope_scaling": None}
    if states_rotated_part(family):
        fields["partial_rotary_factor"] = config.partial_rotary_factor
    if "rope_local_base_freq" in family.defaults:
        fields["rope_local_base_freq"] = plain(_local_base(config))
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == config.rope_type)
    if kind == "default":
        return fields
    if kind == "longrope":
        # Only these names: the Phi-3 of transformers 4 accepts no others.
        return fields | {"rope_scaling": {"type": kind, **_write_long_rope(config)}}
    scaling: Json = {"rope_type": kind, "factor": config.rope_factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = config.original_max_position_embeddings
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
        }
    if kind == "yarn":
        scaling |= _write_yarn(config, family)
    return fields | {"rope_scaling": scaling}


def _read_yarn(rope: Json) -> dict[str, object]:
    return {
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "rope_attention_factor": rope.get("attention_factor"),
        "rope_truncate": rope.get("truncate") is not False,
    }


def _write_yarn(config: DecoderConfig, family: Family) -> Json:
    scaling: Json = {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow}
    if not config.rope_truncate:
        scaling["truncate"] = False
    if "mscale" in family.own_keys:
        return scaling | _write_two_scales(config)
    return scaling | _write_attention_factor(config)


def _read_two_scales(rope: Json, is_yarn: bool) -> dict[str, object]:
    """Returns the keys of the two factors by which DeepSeek's YaRN scales rotated parts, and
    scores.
    """
    of_rotated, of_scores = (rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    if not is_yarn:
        return {"mscale": 1.0}  # the default, which YaRN alone reads

    def grown(by: float) -> float:
        return 0.1 * by * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    keys: dict[str, object] = {"mscale": of_scores}
    if rope.get("attention_factor") is None and of_rotated and of_scores:
        keys["rope_attention_factor"] = grown(of_rotated) / grown(of_scores)
    return keys


def _write_two_scales(config: DecoderConfig) -> Json:
    if not config.mscale:
        return _write_attention_factor(config)
    scales: Json = {"mscale_all_dim": config.mscale}
    if config.rope_attention_factor == 1:
        return scales | {"mscale": config.mscale}  # the ratio of both is that factor
    return scales | _write_attention_factor(config)


def _read_long_rope(model: StatedModel, rope: Json, original: int) -> dict[str, object]:
    factor = rope.get("factor") or max(1.0, model["max_position_embeddings"] / original)
    short, long = (
        ",".join(map(str, map(float, rope[f"{which}_factor"]))) for which in ("short", "long")
    )
    return {
        "rope_factor": factor,
        "rope_short_factors": short,
        "rope_long_factors": long,
        "rope_attention_factor": rope.get("attention_factor"),
    }


def _write_long_rope(config: DecoderConfig) -> Json:
    texts = {"short_factor": config.rope_short_factors, "long_factor": config.rope_long_factors}
    factors = {name: [float(word) for word in text.split(",")] for name, text in texts.items()}
    return factors | _write_attention_factor(config)


def _write_attention_factor(config: DecoderConfig) -> Json:
    if not config.rope_attention_factor:
        return {}
    return {"attention_factor": config.rope_attention_factor}


def _read_rope_of_global_heads(model: StatedModel) -> dict[str, object]:
    """Returns the keys of RoPE on a part of the heads of global layers, and on the heads of the
    others.
    """
    rope = model["rope_parameters"]
    of_global, of_local = (rope.get(name) or {} for name in ("full_attention", "sliding_attention"))
    for layers, kinds in ((of_global, ("proportional", "default")), (of_local, ("default",))):
        kind = layers.get("rope_type", "default")
        share = layers.get("partial_rotary_factor", 1.0)
        if kind not in kinds or layers.get("factor", 1) != 1 or (kind == "default" and share != 1):
            raise model.refused(f"rope_parameters={shown(str(layers))} is not supported")
    return {
        "rope_max_timescale": of_global["rope_theta"],
        "local_rope_max_timescale": of_local["rope_theta"],
        "partial_rotary_factor": of_global.get("partial_rotary_factor", 1.0),
    }


def _write_rope_of_global_heads(config: DecoderConfig) -> Json:
    of_global = {
        "rope_type": "proportional",
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_theta": plain(config.rope_max_timescale),
    }
    of_local = {"rope_type": "default", "rope_theta": plain(_local_base(config))}
    return {"rope_parameters": {"full_attention": of_global, "sliding_attention": of_local}}


def _local_base(config: DecoderConfig) -> float:
    """Returns the base of local layers, which is that of the others unless it is stated."""
    base = config.local_rope_max_timescale
    return base if base > 0 else config.rope_max_timescale


def plain(number: float) -> int | float:
    """Returns a whole number as an int, as the files of transformers have it."""
    return int(number) if float(number).is_integer() else number
