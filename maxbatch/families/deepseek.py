"""Attention whose keys and values come from latents: multi-head latent attention.

Reference: DeepSeek-V2 (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import Any

from maxbatch.families.forms.attention import AttentionForm
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import TinySizes
from maxbatch.families.parameter import ModelKeys, Parameter
from maxbatch.families.record import EXPERTS, MODULES, Family

_MOST = 32  # the largest width of a latent in a tiny model


class Latents(AttentionForm):
    """Latent attention: all heads read one latent of each token, and one rotated key."""

    layer = "maxbatch.model.latent_attention:LatentAttention"
    keys = (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "mscale",
    )
    whole = ("qk_dim", "v_dim", "key_and_value", "q_latent", "latent_and_key")
    summed = ("q_lora", "kv_lora")
    in_float32 = ("q_norm", "kv_norm")
    head_width = "qk_nope_head_dim + qk_rope_head_dim"
    lacks = (
        "attention_bias",
        "attention_out_bias",
        "mlp_projection_bias",
        "use_qk_norm",
        "attention_type",
        "query_pre_attn_scalar",
        "trainable_position_size",
    )
    unread = ("head_dim", "base_num_kv_heads")
    unscaled_queries = "whose queries are made of latents"
    groups_heads = False

    def rows(self, name: str, is_local: bool | None) -> tuple[Parameter, ...]:
        """Returns its parameters; a latent and its product are kept as query and key."""
        del is_local
        query, up = ("heads", "qk_dim"), ("heads", "key_and_value")

        def has_latent(model: ModelKeys) -> bool:
            return bool(model.q_lora_rank)

        def has_no_latent(model: ModelKeys) -> bool:
            return not model.q_lora_rank

        query_down = Parameter(
            f"{name}.query_down", ("q_latent",), ("embed",), kept="query_proj", has=has_latent
        )
        query_up = Parameter(
            f"{name}.query_up", query, ("q_lora",), kept="query_proj", has=has_latent
        )
        return (
            Parameter(f"{name}.query", query, ("embed",), kept="query_proj", has=has_no_latent),
            query_down,
            Parameter(f"{name}.query_down_norm.scale", ("q_norm",), has=has_latent),
            query_up,
            Parameter(f"{name}.latent", ("latent_and_key",), ("embed",), kept="key_proj"),
            Parameter(f"{name}.latent_norm.scale", ("kv_norm",)),
            Parameter(f"{name}.latent_up", up, ("kv_lora",), kept="value_proj"),
            Parameter(f"{name}.out", ("embed",), ("heads", "v_dim"), kept="out_proj"),
        )

    def names_in_maxtext(self) -> dict[str, str]:
        """Returns MaxText's names."""
        return {
            "query": "query.kernel",
            "query_down": "wq_a.kernel",
            "query_down_norm.scale": "q_norm.scale",
            "query_up": "wq_b.kernel",
            "latent": "wkv_a.kernel",
            "latent_norm.scale": "kv_norm.scale",
            "latent_up": "wkv_b.kernel",
            "out": "out.kernel",
        }

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the widths of latents, and of heads in parts."""
        return {
            **dict.fromkeys(("q_lora", "q_latent", "q_norm"), model.q_lora_rank),
            **dict.fromkeys(("kv_lora", "kv_norm"), model.kv_lora_rank),
            "latent_and_key": model.kv_lora_rank + model.qk_rope_head_dim,
            "qk_dim": model.qk_nope_head_dim + model.qk_rope_head_dim,
            "key_and_value": model.qk_nope_head_dim + model.v_head_dim,
            "v_dim": model.v_head_dim,
        }

    def widths(self, model: ModelKeys, is_local: bool) -> tuple[int, int]:
        """Returns the unrotated and the rotated part of a key together, and a value's width."""
        del is_local
        return model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim

    def compressed_width(self, model: ModelKeys) -> int:
        """Returns the widths of a latent and of the rotated part."""
        return int(model.kv_lora_rank + model.qk_rope_head_dim)

    def rotated(self, model: ModelKeys) -> int:
        """Returns the width of the rotated part."""
        return int(model.qk_rope_head_dim)

    def summed_heads(self, model: ModelKeys) -> tuple[str, int, int]:
        """Returns the heads of queries, whose keys the latents make."""
        width = model.qk_nope_head_dim + max(model.qk_rope_head_dim, model.v_head_dim)
        return "base_num_query_heads", width, 1

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for a rotated part without pairs."""
        if config.qk_rope_head_dim % 2:
            raise config.fault(
                "qk_rope_head_dim",
                "even, since rotary embeddings turn pairs",
                config.qk_rope_head_dim + 1,
            )

    def small_keys(self, config: ModelKeys, sizes: TinySizes) -> dict[str, Any]:
        """Returns small widths of latents and of the parts of a head."""
        most = {
            "q_lora_rank": _MOST,
            "kv_lora_rank": _MOST,
            "qk_nope_head_dim": sizes.head_dim,
            "qk_rope_head_dim": sizes.head_dim,
            "v_head_dim": sizes.head_dim,
        }
        return {name: min(int(config[name]), largest) for name, largest in most.items()}


LATENTS: AttentionForm = Latents()

DEEPSEEK = Family(
    decoder_block="deepseek", model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    attention=LATENTS,
    experts=Experts(keys=(
        "shared_experts", "first_num_dense_layers", "routed_score_func", "routed_scaling_factor", "n_routing_groups",
        "topk_routing_group",
    )),
    defaults={
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    fields={"num_experts": "n_routed_experts"},
    modules={
        **MODULES, **EXPERTS, "attention.query_down": "self_attn.q_a_proj",
        "attention.query_down_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
        "attention.latent": "self_attn.kv_a_proj_with_mqa", "attention.latent_norm": "self_attn.kv_a_layernorm",
        "attention.latent_up": "self_attn.kv_b_proj", "shared_experts.gate": "mlp.shared_experts.gate_proj",
        "shared_experts.up": "mlp.shared_experts.up_proj", "shared_experts.down": "mlp.shared_experts.down_proj",
    },
    tensors={"experts.routed_bias": "mlp.gate.e_score_correction_bias"},
)  # fmt: skip
