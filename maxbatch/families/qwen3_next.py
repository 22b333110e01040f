"""The gated delta rule in place of attention: a token reads a state of all tokens before it.

Reference: Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from maxbatch.families.forms.attention import AttentionForm, GroupedAttention
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import TinySizes
from maxbatch.families.forms.norms import Norms
from maxbatch.families.parameter import ModelKeys, Parameter
from maxbatch.families.record import EXPERTS, MODULES, Family

# Tokens that a convolution sees. No config key states it, since all published models have this one
# (Qwen3-Next's `linear_conv_kernel_dim`).
CONVOLUTION_TOKENS = 4


class DeltaRule(AttentionForm):
    """The gated delta rule, with heads of its own."""

    layer = "maxbatch.model.delta_rule:GatedDeltaNet"
    keys = (
        "inhomogeneous_layer_cycle_interval",
        "gdn_num_key_heads",
        "gdn_num_value_heads",
        "gdn_key_head_dim",
        "partial_rotary_factor",  # of the attention beside it
    )
    steps = ("inhomogeneous_layer_cycle_interval",)
    over_tensor = ("delta_key_heads", "delta_heads")
    whole = ("delta_key_dim", "delta_value_dim", "convolution")
    in_float32 = ("delta_norm", "decay_heads")
    has_windows = False

    def rows(self, name: str, is_local: bool | None) -> tuple[Parameter, ...]:
        """Returns its parameters; the gate is kept as the values, which are as wide."""
        del is_local
        key, value = ("delta_key_heads", "delta_key_dim"), ("delta_heads", "delta_value_dim")
        rates = ("delta_heads",)
        return (
            Parameter(f"{name}.delta_query", key, ("embed",), kept="query_proj"),
            Parameter(f"{name}.delta_key", key, ("embed",), kept="key_proj"),
            Parameter(f"{name}.delta_value", value, ("embed",), kept="value_proj"),
            Parameter(f"{name}.delta_gate", value, ("embed",), kept="value_proj"),
            Parameter(f"{name}.delta_rate", rates, ("embed",), kept="key_proj"),
            Parameter(f"{name}.delta_decay", rates, ("embed",), kept="key_proj"),
            Parameter(f"{name}.convolved_query", (*key, "convolution"), is_convolution=True),
            Parameter(f"{name}.convolved_key", (*key, "convolution"), is_convolution=True),
            Parameter(f"{name}.convolved_value", (*value, "convolution"), is_convolution=True),
            Parameter(f"{name}.decay_scale", ("decay_heads",), first="decays"),
            Parameter(f"{name}.decay_shift", ("decay_heads",), first="ones"),
            Parameter(f"{name}.delta_norm.scale", ("delta_norm",), first="ones"),
            Parameter(f"{name}.delta_out", ("embed",), value, kept="out_proj"),
        )

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the numbers of its heads, their widths, and the width of a convolution."""
        widths = ("delta_key_dim", "delta_value_dim", "delta_norm")
        return {
            "delta_key_heads": model.gdn_num_key_heads,
            **dict.fromkeys(("delta_heads", "decay_heads"), model.gdn_num_value_heads),
            **dict.fromkeys(widths, model.gdn_key_head_dim),
            "convolution": CONVOLUTION_TOKENS,
        }

    def is_at(self, model: ModelKeys, place: int) -> bool:
        """Returns whether a layer is not the last one of the cycle."""
        return bool((place + 1) % model.inhomogeneous_layer_cycle_interval > 0)

    def state_operations(self, model: ModelKeys) -> int:
        """Returns 24 * H * k * v, for a decay, two readings and a writing of H states of k times v,
        as in Megatron-LM.
        """
        return int(24 * model.gdn_num_value_heads * model.gdn_key_head_dim**2)

    def summed_heads(self, model: ModelKeys) -> tuple[str, int, int]:
        """Returns the heads of values, which those of keys divide."""
        return "gdn_num_value_heads", model.gdn_key_head_dim, model.gdn_num_key_heads

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for numbers of heads, or of the rotated part of the attention beside
        it, that exclude each other.
        """
        heads, keys = config.gdn_num_value_heads, config.gdn_num_key_heads
        if heads % keys:
            raise config.fault(
                "gdn_num_value_heads",
                f"a multiple of gdn_num_key_heads={keys}",
                max(1, round(heads / keys)) * keys,
            )
        turned = int(config.head_dim * config.partial_rotary_factor)
        if turned % 2 or not turned:
            even = max(2, 2 * round(turned / 2)) / config.head_dim
            rule = (
                f"such that head_dim={config.head_dim} times it is even, since rotary embeddings "
                "turn pairs"
            )
            raise config.fault("partial_rotary_factor", rule, f"{even:g}")

    def small_keys(self, config: ModelKeys, sizes: TinySizes) -> dict[str, Any]:
        """Returns small sizes, and a share of a head that turns in the attention beside it."""
        shared = min(2, config.gdn_num_value_heads // config.gdn_num_key_heads)
        heads, head_dim = sizes.heads, sizes.head_dim
        turned = max(2, 2 * round(head_dim * config.partial_rotary_factor / 2))
        return {
            "gdn_num_key_heads": heads,
            "gdn_num_value_heads": shared * heads,
            "gdn_key_head_dim": head_dim,
            "partial_rotary_factor": turned / head_dim,
        }


DELTA_RULE: AttentionForm = DeltaRule()

QWEN3_NEXT = Family(
    decoder_block="qwen3_next", model_type="qwen3_next", architecture="Qwen3NextForCausalLM",
    norms=Norms(add_one=True), attention_before=DELTA_RULE,
    attention=GroupedAttention(has_query_gate=True, has_qk_norm=True),
    experts=Experts(keys=("shared_experts",), have_shared_gate=True),
    defaults={
        "intermediate_size": 5632, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
    },
    fixed={"linear_conv_kernel_dim": CONVOLUTION_TOKENS},
    bias_fields=("attention_bias",),
    modules={
        **MODULES, **EXPERTS, "attention.query_gate": "self_attn.q_proj",
        **dict.fromkeys((f"attention.delta_{part}" for part in ("query", "key", "value", "gate")),
                        "linear_attn.in_proj_qkvz"),
        **dict.fromkeys((f"attention.delta_{part}" for part in ("rate", "decay")), "linear_attn.in_proj_ba"),
        **dict.fromkeys((f"attention.convolved_{part}" for part in ("query", "key", "value")), "linear_attn.conv1d"),
        "attention.delta_norm": "linear_attn.norm", "attention.delta_out": "linear_attn.out_proj",
        "shared_experts.gate": "mlp.shared_expert.gate_proj", "shared_experts.up": "mlp.shared_expert.up_proj",
        "shared_experts.down": "mlp.shared_expert.down_proj", "shared_experts.shared_gate": "mlp.shared_expert_gate",
    },
    tensors={"attention.decay_scale": "linear_attn.A_log", "attention.decay_shift": "linear_attn.dt_bias"},
    by_head={
        "self_attn.q_proj": "heads", "linear_attn.in_proj_qkvz": "delta_key_heads",
        "linear_attn.in_proj_ba": "delta_key_heads",
    },
)  # fmt: skip
QWEN3_5 = dataclasses.replace(
    QWEN3_NEXT, decoder_block="qwen3_5", model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
    experts=Experts(keys=("shared_experts",), have_shared_gate=True, always_normalise=True),
    defaults={
        **QWEN3_NEXT.defaults, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    },
    modules={
        **QWEN3_NEXT.modules,
        **dict.fromkeys((f"attention.delta_{part}" for part in ("query", "key", "value")), "linear_attn.in_proj_qkv"),
        "attention.delta_gate": "linear_attn.in_proj_z", "attention.delta_rate": "linear_attn.in_proj_b",
        "attention.delta_decay": "linear_attn.in_proj_a",
    },
    by_head={"self_attn.q_proj": "heads"},
)  # fmt: skip
