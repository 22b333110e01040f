"""Attention within chunks of a document, with layers between that rotate nothing and see all of it.

Source: Llama 4 (transformers, `models/llama4`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from maxbatch.families.forms.attention import GROWTH_FACTOR, GROWTH_TOKENS, GroupedAttention
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import TinySizes, refusal
from maxbatch.families.parameter import ModelKeys
from maxbatch.families.record import MODULES, Family


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedAttention(GroupedAttention):
    """Grouped-query attention whose local layers, those with RoPE, see their chunk of the document
    alone.
    """

    keys = ("nope_layer_interval", "chunk_attn_window_size", "temperature_tuning")
    steps = ("nope_layer_interval",)

    def scores(self, model: ModelKeys) -> str:
        """Returns the class whose scores know chunks, if there are any."""
        if not model.chunk_attn_window_size:
            return super().scores(model)
        return "maxbatch.model.chunks:ChunkedScores"

    def window(self, model: ModelKeys) -> int:
        """Returns the tokens of a chunk, or of a window if there are no chunks."""
        return int(model.chunk_attn_window_size or super().window(model))

    def twice_seen(self, model: ModelKeys, length: int, is_local: bool) -> int:
        """Returns a chunk's tokens for a local layer: a token sees half of them."""
        if not is_local or not model.chunk_attn_window_size:
            return super().twice_seen(model, length, is_local)
        return min(int(model.chunk_attn_window_size), length)

    def rotates(self, model: ModelKeys, place: int) -> bool:
        """Returns whether a layer is none of those that rotate nothing."""
        every = model.nope_layer_interval
        return bool(every < 1 or (place + 1) % every > 0)

    def is_local(self, model: ModelKeys, has_rope: bool, by_pattern: bool) -> bool:
        """Returns whether a layer has chunks, if there are any: those with RoPE have."""
        return has_rope if model.chunk_attn_window_size else by_pattern

    def excluded_by_windows(self, config: ModelKeys) -> dict[str, object]:
        """Returns that there are no chunks."""
        return {"chunk_attn_window_size": 0} if config.chunk_attn_window_size else {}

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for scores that grow, or layers that rotate nothing, where all layers
        or none have RoPE.
        """
        super().check(config)
        grows: dict[str, object] = (
            {"temperature_tuning": "false"} if config.temperature_tuning else {}
        )
        if grows and config.nope_layer_interval == -1:
            rule = "false beside nope_layer_interval=-1: all layers have RoPE"
            raise refusal(config, rule, grows)
        if config.nope_layer_interval != -1 and config.trainable_position_size > 0:
            rule = "-1 beside trainable_position_size, which leaves out RoPE"
            raise refusal(config, rule, {"nope_layer_interval": -1} | grows)

    def small_keys(self, config: ModelKeys, sizes: TinySizes) -> dict[str, Any]:
        """Returns a small chunk."""
        return {"chunk_attn_window_size": min(config.chunk_attn_window_size, sizes.length // 2)}


LLAMA4 = Family(
    decoder_block="llama4", model_type="llama4_text", architecture="Llama4ForCausalLM",
    attention=ChunkedAttention(qk_norm_over="rotated", rotates_neighbours=True),
    experts=Experts(
        keys=("interleave_moe_layer_step", "shared_experts", "routed_score_func"), weigh_inputs=True,
    ),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts": 16,
        "num_experts_per_tok": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "use_qk_norm": True,
    },
    fixed={"floor_scale": GROWTH_TOKENS, "attn_scale": GROWTH_FACTOR},
    fields={"num_experts": "num_local_experts"}, bias_fields=("attention_bias",),
    modules={
        **MODULES, "experts.router": "feed_forward.router",
        **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{f"shared_experts.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    },
    tensors={
        "experts.expert_gate": "feed_forward.experts.gate_up_proj",
        "experts.expert_up": "feed_forward.experts.gate_up_proj",
        "experts.expert_down": "feed_forward.experts.down_proj",
    },
    experts_alternate=False,
)  # fmt: skip
