"""The `config.json` of a Hugging Face model as config keys, read as transformers 4 and 5
write it.
"""

from __future__ import annotations

import math
import os

from maxbatch.around.huggingface.folder.fields import check_fields
from maxbatch.config.hub import folder_of, hub_name, hub_problem
from maxbatch.config.values import shown, shown_path
from maxbatch.families.family import GLOBAL, LOCAL, MODEL_TYPES, Family, Json
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.bounded import read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

_DEFAULT_LENGTH = 256  # max_target_length of base.yml

ROPE_TYPES = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3.1",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
}
_GATED, _PLAIN = ("silu", "gelu", "gelu_exact"), ("gelu", "gelu_exact")
_BIASES = ("attention_bias", "mlp_bias")
_CHUNK = "attention_chunk_size"  # a field of Llama 4's form
_INPUT_WIDTH = "hidden_size_per_layer_input"  # of Gemma 4's small models
_LAYER_TYPES = {"sliding_attention": LOCAL, "full_attention": GLOBAL}
_DELTA_RULE = "linear_attention"  # of layer_types
# Fields of which only these values are supported; a file may lack them.
_ONLY: dict[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "clip_qkv": (None,),
    "swiglu_limit": (7.0, None),
    "swiglu_alpha": (1.702, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "rope_interleave": (True, None),
}
_QUANTIZED = {"mxfp4": "packed 4-bit weights", "fp8": "8-bit weights with scales of blocks"}


def is_huggingface_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path, or a name of the hub, is a folder with a `config.json`, as Hugging
    Face's models have.
    """
    return not hub_problem(path) and (folder_of(path) / CONFIG_FILE).is_file()


def read_config_json(path: str | os.PathLike[str], name: str = CONFIG_FILE) -> Json:
    """Returns the `config.json` of a folder; raises ConfigError if it cannot be read or is no
    object.
    """
    file = folder_of(path) / name
    with reading(file):
        found = read_json(file, shown_path(file))
    if not isinstance(found, dict):
        raise ConfigError(f"{shown_path(file)}: must be a JSON object")
    return found


def has_generation_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a Hugging Face folder has a `generation_config.json`."""
    return is_huggingface_folder(path) and (folder_of(path) / GENERATION_FILE).is_file()


def stated_end_tokens(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the ids that end a text, from a folder's `generation_config.json`, else from its
    `config.json`.

    Raises:
      ConfigError: the file cannot be read, or its value is not ids.
    """
    has_own = has_generation_file(path)
    name = GENERATION_FILE if has_own else CONFIG_FILE
    stated = read_config_json(path, name).get("eos_token_id")
    tokens = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        where = f"{shown_path(folder_of(path))}/{name}"
        raise ConfigError(
            f"{where}: eos_token_id={shown(repr(stated))}: must be the id of a token, or a list "
            "of ids"
        )
    return tuple(tokens)


def stated_length(path: str | os.PathLike[str]) -> int:
    """Returns the context length that a folder's `config.json` states; 0 if it states none.

    Raises:
      ConfigError: the file cannot be read.
    """
    fields = read_config_json(path)
    stated = fields.get("max_position_embeddings", fields.get("n_positions"))
    return stated if type(stated) is int else 0


def keys_of_folder(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the texts of the keys that a Hugging Face folder states, for the model and for its
    tokenizer.

    Raises:
      ConfigError: a family, or a setting of one, that is not supported.
    """
    folder = folder_of(path)
    keys = model_keys(read_config_json(path), f"{shown_path(folder)}/{CONFIG_FILE}") | {
        "scan_layers": "true"
    }
    if 0 < int(keys.get("trainable_position_size", 0)) < _DEFAULT_LENGTH:
        keys["max_target_length"] = keys["trainable_position_size"]
    if (folder / TOKENIZER_FILE).is_file():
        keys |= {"tokenizer_type": "huggingface", "tokenizer_path": hub_name(path) or str(folder)}
    return keys


def model_keys(stated: Json, where: str) -> dict[str, str]:
    """Returns the texts of the model keys that a `config.json` states; `where` names it in
    messages.

    Raises:
      ConfigError: a family, or a setting of one, that is not supported; a field is missing or of
        another type.
    """
    family = _family(stated, where)
    try:
        return _Fields(family, stated, where).keys()
    except KeyError as error:
        raise ConfigError(f"{where}: lacks {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        raise ConfigError(f"{where}: a field of the model has a value of the wrong type") from None


def _family(stated: Json, where: str) -> Family:
    name = str(stated.get("model_type"))
    if name not in MODEL_TYPES:
        works = ", ".join(MODEL_TYPES)
        raise ConfigError(
            f"{where}: model_type={shown(name)} is not supported; works: one of {works}"
        )
    family = next(
        (one for one in MODEL_TYPES[name] if _has_width(one, stated)), MODEL_TYPES[name][0]
    )
    experts = [
        field
        for field, value in stated.items()
        if "expert" in field and value and not family.has_experts
    ]
    if experts:
        value = shown(str(stated[experts[0]]))
        raise ConfigError(
            f"{where}: {shown(experts[0])}={value} is not supported for {name}, which has no "
            "experts"
        )
    packed = stated.get("quantization_config")
    method = str(packed.get("quant_method")) if isinstance(packed, dict) else ""
    if method in _QUANTIZED:
        raise ConfigError(
            f"{where}: quantization_config.quant_method={method}: {_QUANTIZED[method]} are not "
            "read; works: a folder with the weights in bfloat16"
        )
    only = _ONLY | {field: (value,) for field, value in family.fixed.items()}
    if family.has_delta_rule:
        del only["partial_rotary_factor"]
    for field, allowed in only.items():
        if field in stated and stated[field] not in allowed:
            raise ConfigError(
                f"{where}: {field}={shown(str(stated[field]))} is not supported for {name}"
            )
    if biases := [
        field for field in _BIASES if stated.get(field) and field not in family.bias_fields
    ]:
        raise ConfigError(
            f"{where}: {biases[0]}={shown(str(stated[biases[0]]))} is not supported for {name}"
        )
    return family


def _has_width(family: Family, stated: Json) -> bool:
    """Returns whether a file states as wide inputs of the layers as the family has."""
    return bool((family.defaults | stated).get(_INPUT_WIDTH, 0) == family.layer_input_width)


class _Fields:
    """The fields of a `config.json`, with the defaults of its family."""

    def __init__(self, family: Family, stated: Json, where: str) -> None:
        self._family, self._where = family, where
        own_names = {own: name for name, own in family.fields.items()}
        own = {own_names[name]: value for name, value in stated.items() if name in own_names}
        # as transformers 5 writes it for any family
        if family.has_experts and "num_local_experts" in stated:
            own["num_experts"] = stated["num_local_experts"]
        self._stated = family.defaults | stated | own
        check_fields(self._stated, family.fields, where)

    def keys(self) -> dict[str, str]:
        stated, family = self._stated, self._family
        width, heads, layers = (
            stated[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        keys: dict[str, object] = {
            "decoder_block": family.decoder_block,
            "base_emb_dim": width,
            "base_num_query_heads": heads,
            "base_num_kv_heads": stated.get("num_key_value_heads") or heads,
            "head_dim": (stated.get("head_dim") if family.has_head_dim else None) or width // heads,
            "base_mlp_dim": self._mlp_dim(width),
            "base_num_decoder_layers": layers,
            "vocab_size": stated["vocab_size"],
            "logits_via_embedding": bool(stated.get("tie_word_embeddings", False)),
            "normalization_layer_epsilon": stated.get("rms_norm_eps", 1e-6),
            "mlp_activations": self._activations(),
            "attention_bias": family.has_attention_bias or bool(stated.get("attention_bias")),
            "attention_out_bias": bool(stated.get("attention_bias")),
            "mlp_projection_bias": bool(stated.get("mlp_bias")),
            "use_qk_norm": family.has_qk_norm,
            "attn_logits_soft_cap": (stated.get("attn_logit_softcapping") or 0)
            if family.has_soft_caps
            else 0,
            "final_logits_soft_cap": (stated.get("final_logit_softcapping") or 0)
            if family.has_soft_caps
            else 0,
            "query_pre_attn_scalar": stated.get("query_pre_attn_scalar"),
            **(self._experts() if self._has_experts else {}),
            **(self._global_heads(layers) if family.has_global_heads else {}),
            **(self._latents() if family.has_latents else {}),
            **(self._delta_rule(layers) if family.has_delta_rule else {}),
            **self._windows(layers),
            **(self._chunks(layers) if _CHUNK in family.defaults else {}),
            **(self._rope() if family.has_rope else {"trainable_position_size": self._positions()}),
        }
        texts = {True: "true", False: "false", None: "null"}
        return {
            name: texts[value] if value is None or isinstance(value, bool) else str(value)
            for name, value in keys.items()
        }

    def _mlp_dim(self, width: int) -> int:
        stated: int | None = self._stated.get("intermediate_size")
        return (
            4 * width
            if stated is None and not self._family.has_rope
            else self._stated["intermediate_size"]
        )

    @property
    def _has_experts(self) -> bool:
        has_them = not self._family.has_experts_beside_mlp or bool(
            self._stated.get("enable_moe_block")
        )
        return self._family.has_experts and has_them

    def _global_heads(self, num_layers: int) -> dict[str, object]:
        """Returns the keys of heads that only global layers have, stated for all of them or layer
        by layer.
        """
        stated, types = self._stated, self._layer_types(num_layers)
        family, last = self._family, stated.get("num_kv_shared_layers") or 0
        only: dict[str, object] = {
            _INPUT_WIDTH: family.layer_input_width,
            "attention_k_eq_v": family.shares_kv_projections,
        }
        if family.layer_input_width:
            only["vocab_size_per_layer_input"] = stated["vocab_size"]
        else:
            only |= {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        for field, value in only.items():
            if (stated.get(field) or 0) != value:
                shown_value = shown(str(stated.get(field)))
                raise ConfigError(
                    f"{self._where}: {field}={shown_value} is not supported for "
                    f"{family.decoder_block}"
                )
        if types[-1:] == [LOCAL]:
            raise ConfigError(f"{self._where}: layer_types: the last layer must be full_attention")
        head_dim = stated["global_head_dim"]
        kv_heads = (
            stated.get("num_global_key_value_heads") if family.shares_kv_projections else None
        )
        by_layer = stated.get("per_layer_config")
        if by_layer is not None:
            own = {
                "head_dim": stated["head_dim"],
                "num_key_value_heads": stated["num_key_value_heads"],
            }
            found = [own | (by_layer.get(str(layer)) or {}) for layer in range(num_layers)]
            of_global = next(
                (one for one, kind in zip(found, types, strict=True) if kind == GLOBAL), own
            )
            if any(
                one != (of_global if kind == GLOBAL else own)
                for one, kind in zip(found, types, strict=True)
            ):
                raise ConfigError(
                    f"{self._where}: per_layer_config is not supported unless all full_attention "
                    "layers, and they alone, have one head_dim and num_key_value_heads"
                )
            head_dim, kv_heads = of_global["head_dim"], of_global["num_key_value_heads"]
        if head_dim != 2 * stated["head_dim"]:
            raise ConfigError(
                f"{self._where}: global_head_dim={head_dim} is not supported: heads of "
                f"full_attention layers are twice as wide as head_dim={stated['head_dim']}"
            )
        return {
            "global_num_kv_heads": kv_heads or 0,
            "num_kv_shared_layers": last,
            "use_double_wide_mlp": last > 0 and bool(stated.get("use_double_wide_mlp")),
            "query_pre_attn_scalar": 1,
        }

    def _experts(self) -> dict[str, object]:
        """Returns the keys of experts; the weights of balance are those that training states."""
        stated, width = self._stated, self._stated.get("moe_intermediate_size")
        return {
            "num_experts": stated["num_experts"],
            "num_experts_per_tok": stated["num_experts_per_tok"],
            "base_moe_mlp_dim": -1 if width is None else width,
            "norm_topk_prob": self._family.always_normalises or bool(stated.get("norm_topk_prob")),
        }

    def _latents(self) -> dict[str, object]:
        """Returns the keys of DeepSeek's form."""
        stated = self._stated
        heads, kv_heads = stated["num_attention_heads"], stated.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise ConfigError(
                f"{self._where}: num_key_value_heads={kv_heads} is not supported: latents make a "
                f"key of each of the {heads} heads"
            )
        groups = stated["n_group"] or 1
        names = (
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "routed_scaling_factor",
        )
        return {
            **{name: stated[name] for name in names},
            "head_dim": stated["qk_rope_head_dim"],
            "q_lora_rank": stated["q_lora_rank"] or 0,
            "shared_experts": stated["n_shared_experts"] or 0,
            "first_num_dense_layers": stated["first_k_dense_replace"] or 0,
            "n_routing_groups": groups if groups > 1 else -1,
            "topk_routing_group": stated["topk_group"] or groups if groups > 1 else -1,
            "routed_score_func": "sigmoid",
            "routed_bias": True,
        }

    def _chunks(self, num_layers: int) -> dict[str, object]:
        """Returns the keys of Llama 4's form."""
        stated, chunk = self._stated, self._stated[_CHUNK] or 0
        every, step = stated["no_rope_layer_interval"], stated["interleave_moe_layer_step"]
        rotates = stated.get("no_rope_layers") or [
            int((layer + 1) % every != 0) for layer in range(num_layers)
        ]
        sparse = stated.get("moe_layers")
        sparse = range(step - 1, num_layers, step) if sparse is None else sparse
        types = [
            "chunked_attention" if chunk and own else "full_attention"
            for own in rotates[:num_layers]
        ]
        if (stated.get("layer_types") or types) != types:
            raise ConfigError(
                f"{self._where}: layer_types is not supported: layers with RoPE have chunks, if "
                "any have"
            )
        unrotated = self._period("no_rope_layers", [not own for own in rotates], num_layers)
        return {
            "base_mlp_dim": stated["intermediate_size_mlp"],
            "base_moe_mlp_dim": stated["intermediate_size"],
            "shared_experts": 1,
            "routed_score_func": "sigmoid",
            "use_qk_norm": bool(stated["use_qk_norm"]),
            "chunk_attn_window_size": chunk,
            "nope_layer_interval": unrotated,
            "interleave_moe_layer_step": self._period(
                "moe_layers", [layer in sparse for layer in range(num_layers)], num_layers
            ),
            "temperature_tuning": bool(stated["attn_temperature_tuning"]) and unrotated != -1,
        }

    def _period(self, field: str, flags: list[bool], num_layers: int) -> int:
        """Returns n if the flag of every n-th layer alone is set; -1 if none is."""
        flags = flags[:num_layers]
        every = flags.index(True) + 1 if any(flags) else -1
        if len(flags) < num_layers or any(
            own != (every > 0 and number % every == 0) for number, own in enumerate(flags, 1)
        ):
            raise ConfigError(
                f"{self._where}: {field} is not supported: it must name every n-th layer"
            )
        return every

    def _delta_rule(self, num_layers: int) -> dict[str, object]:
        """Returns the keys of a family whose layers have a gated delta rule, and every n-th one
        attention.
        """
        stated, width = self._stated, self._stated["moe_intermediate_size"]
        every = stated.get("full_attention_interval") or 4
        types = [
            "full_attention" if (layer + 1) % every == 0 else _DELTA_RULE
            for layer in range(num_layers)
        ]
        if found := stated.get("layer_types"):
            types, every = (
                found,
                found.index("full_attention") + 1 if "full_attention" in found else num_layers + 1,
            )
        if types != [
            "full_attention" if (layer + 1) % every == 0 else _DELTA_RULE
            for layer in range(num_layers)
        ]:
            raise ConfigError(
                f"{self._where}: layer_types: must have full_attention in every n-th layer and "
                f"{_DELTA_RULE} in the others"
            )
        shared = stated["shared_expert_intermediate_size"] or 0
        if shared % width:
            raise ConfigError(
                f"{self._where}: shared_expert_intermediate_size={shared} is not supported: must "
                f"be a multiple of moe_intermediate_size={width}"
            )
        head_dim, value_dim = stated["linear_key_head_dim"], stated["linear_value_head_dim"]
        if value_dim != head_dim:
            raise ConfigError(
                f"{self._where}: linear_value_head_dim={value_dim} is not supported: values are "
                f"as wide as keys, linear_key_head_dim={head_dim}"
            )
        return {
            "inhomogeneous_layer_cycle_interval": every,
            "shared_experts": shared // width,
            "gdn_num_key_heads": stated["linear_num_key_heads"],
            "gdn_num_value_heads": stated["linear_num_value_heads"],
            "gdn_key_head_dim": head_dim,
        }

    def _positions(self) -> int:
        positions: int = self._stated.get("max_position_embeddings") or 1024
        return positions

    def _activations(self) -> str:
        name = self._stated.get("hidden_act") or "silu"
        ours = ACTIVATIONS.get(self._family.activations.get(name, name))
        if ours is None or ours not in (_GATED if self._family.is_gated else _PLAIN):
            field = self._family.fields.get("hidden_act", "hidden_act")
            raise ConfigError(
                f"{self._where}: {field}={shown(str(name))} is not supported for "
                f"{self._family.decoder_block}"
            )
        return f"{ours},linear" if self._family.is_gated else ours

    def _windows(self, num_layers: int) -> dict[str, object]:
        window = self._stated.get("sliding_window")
        if "use_sliding_window" in self._stated and not self._stated["use_sliding_window"]:
            window = None
        types = (
            self._layer_types(num_layers)
            if window and not self._family.has_delta_rule
            else [GLOBAL]
        )
        if LOCAL not in types:
            return {"attention_type": GLOBAL, "sliding_window_size": 0}
        return {"attention_type": ",".join(_shortest_cycle(types)), "sliding_window_size": window}

    def _layer_types(self, num_layers: int) -> list[str]:
        stated, every = self._stated.get("layer_types"), self._family.local_every
        if stated:
            if unknown := [name for name in stated if name not in _LAYER_TYPES]:
                raise ConfigError(
                    f"{self._where}: layer_types={shown(str(unknown[0]))} is not supported"
                )
            return [_LAYER_TYPES[name] for name in stated]
        if every == 1:
            return [LOCAL]
        if every:
            every = (
                self._stated.get("sliding_window_pattern")
                or self._stated.get("_sliding_window_pattern")
                or every
            )
            return [LOCAL if (layer + 1) % every else GLOBAL for layer in range(num_layers)]
        if self._stated.get("use_sliding_window"):
            first = self._stated.get("max_window_layers", 28)
            return [LOCAL if layer >= first else GLOBAL for layer in range(num_layers)]
        return [GLOBAL]

    def _rope_of_global_heads(self) -> dict[str, object]:
        """Returns the keys of RoPE on a part of the heads of global layers, and on the heads of the
        others.
        """
        rope = self._stated["rope_parameters"]
        of_global, local = (
            rope.get(name) or {} for name in ("full_attention", "sliding_attention")
        )
        for part, kinds in ((of_global, ("proportional", "default")), (local, ("default",))):
            kind = part.get("rope_type", "default")
            share = part.get("partial_rotary_factor", 1.0)
            if (
                kind not in kinds
                or part.get("factor", 1) != 1
                or (kind == "default" and share != 1)
            ):
                raise ConfigError(
                    f"{self._where}: rope_parameters={shown(str(part))} is not supported"
                )
        return {
            "rope_max_timescale": of_global["rope_theta"],
            "local_rope_max_timescale": local["rope_theta"],
            "partial_rotary_factor": of_global.get("partial_rotary_factor", 1.0),
        }

    def _rope(self) -> dict[str, object]:
        if self._family.has_global_heads:
            return self._rope_of_global_heads()
        stated = self._stated
        rope = dict(stated.get("rope_parameters") or {})
        local_base = stated.get("rope_local_base_freq")
        if "full_attention" in rope or "sliding_attention" in rope:
            local = rope.get("sliding_attention") or {}
            if local.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"{self._where}: rope_type={shown(str(local['rope_type']))} is not supported "
                    "for sliding_attention"
                )
            local_base = local.get("rope_theta", local_base)
            rope = dict(rope.get("full_attention") or {})
        rope = (
            {"rope_theta": stated.get("rope_theta") or 10000.0}
            | dict(stated.get("rope_scaling") or {})
            | rope
        )
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES:
            works = ", ".join(ROPE_TYPES)
            raise ConfigError(
                f"{self._where}: rope_type={shown(str(kind))} is not supported; works: one of "
                f"{works}"
            )
        turns_part = self._family.has_delta_rule
        fixed: dict[str, object] = {} if turns_part else {"partial_rotary_factor": 1}
        fixed |= {} if self._family.has_latents else {"mscale": None}
        for field, only in fixed.items():
            if rope.get(field, only) not in (only, None):
                raise ConfigError(
                    f"{self._where}: {field}={shown(str(rope[field]))} is not supported"
                )
        keys = {"rope_max_timescale": rope["rope_theta"], "rope_type": ROPE_TYPES[kind]}
        if turns_part:
            keys["partial_rotary_factor"] = rope.get(
                "partial_rotary_factor", stated["partial_rotary_factor"]
            )
        if self._family.local_every and local_base:
            keys["local_rope_max_timescale"] = local_base
        originals = (
            rope.get("original_max_position_embeddings"),
            stated.get("original_max_position_embeddings"),
        )
        original = next(filter(None, originals), stated.get("max_position_embeddings"))
        is_long = ROPE_TYPES[kind] == "longrope"
        if is_long:
            keys |= self._long_factors(rope, original or stated["original_max_position_embeddings"])
        elif kind != "default":
            keys["rope_factor"] = rope["factor"]
        if (is_long or kind in ("llama3", "yarn")) and original:
            keys["original_max_position_embeddings"] = original
        if kind == "llama3":
            keys |= {
                "rope_low_freq_factor": rope["low_freq_factor"],
                "rope_high_freq_factor": rope["high_freq_factor"],
            }
        if kind == "yarn":
            keys |= {
                "beta_fast": rope.get("beta_fast") or 32,
                "beta_slow": rope.get("beta_slow") or 1,
            }
            keys["rope_attention_factor"] = rope.get("attention_factor")
            keys["rope_truncate"] = rope.get("truncate") is not False
        if self._family.has_latents:
            keys |= _scales_of_latents(rope, kind == "yarn")
        return keys

    def _long_factors(self, rope: Json, original: int) -> dict[str, object]:
        factor = rope.get("factor") or max(1.0, self._stated["max_position_embeddings"] / original)
        short, long = (
            ",".join(map(str, map(float, rope[f"{which}_factor"]))) for which in ("short", "long")
        )
        return {
            "rope_factor": factor,
            "rope_short_factors": short,
            "rope_long_factors": long,
            "rope_attention_factor": rope.get("attention_factor"),
        }


def _scales_of_latents(rope: Json, is_yarn: bool) -> dict[str, object]:
    """Returns the keys of the two factors by which DeepSeek's YaRN scales rotated parts, and
    scores.
    """
    own, of_scores = (rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    if not is_yarn:
        return {"mscale": 1.0}  # the default, which YaRN alone reads

    def grown(by: float) -> float:
        return 0.1 * by * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    keys: dict[str, object] = {"mscale": of_scores}
    if rope.get("attention_factor") is None and own and of_scores:
        keys["rope_attention_factor"] = grown(own) / grown(of_scores)
    return keys


def _shortest_cycle(types: list[str]) -> list[str]:
    """Returns the shortest pattern that repeats to the types of all layers."""
    fits = (
        n for n in range(1, len(types)) if all(own == types[i % n] for i, own in enumerate(types))
    )
    return types[: next(fits, len(types))]
