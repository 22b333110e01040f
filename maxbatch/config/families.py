"""The families of Hugging Face's models, as data: their names there, and the defaults of their `config.json`.

Defaults are those of the transformers library, where a file that lacks a field means its class's default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type`, and how its fields map to config keys."""

    decoder_block: str
    architecture: str  # the class of its causal language model
    defaults: Json = dataclasses.field(default_factory=dict)
    is_gated: bool = True  # whether its MLP has a linear projection beside the activated one
    has_qk_norm: bool = False
    has_attention_bias: bool = False  # of queries, keys and values
    bias_fields: tuple[str, ...] = ()  # the fields that give its projections biases
    local_every: int = (
        0  # n: every n-th layer is global and the others local; 1: all are local; 0: what layer_types says
    )
    head_dim_field: bool = True  # whether head_dim may differ from hidden_size / num_attention_heads
    fields: dict[str, str] = dataclasses.field(default_factory=dict)  # its own names of common fields
    has_rope: bool = True
    has_soft_caps: bool = False


_GEMMA: Json = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_BIAS = ("attention_bias",)
_GPT2_FIELDS = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("llama2", "LlamaForCausalLM", bias_fields=("attention_bias", "mlp_bias")),
    "mistral": Family(
        "mistral", "MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, local_every=1
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", has_attention_bias=True, head_dim_field=False),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {"head_dim": 128}, has_qk_norm=True, bias_fields=_BIAS),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        local_every=2, fields={"hidden_act": "hidden_activation"}, has_soft_caps=True, bias_fields=_BIAS,
    ),
    "gemma3_text": Family(
        "gemma3", "Gemma3ForCausalLM", {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
        has_qk_norm=True, local_every=6, fields={"hidden_act": "hidden_activation"}, has_soft_caps=True,
        bias_fields=_BIAS,
    ),
    "olmo2": Family(
        "olmo2", "Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, has_qk_norm=True, head_dim_field=False, bias_fields=_BIAS
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", {"rms_norm_eps": 1e-5}, local_every=1, head_dim_field=False),
    "gpt2": Family(
        "gpt2", "GPT2LMHeadModel",
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
        is_gated=False, has_attention_bias=True, head_dim_field=False, fields=_GPT2_FIELDS, has_rope=False,
    ),
}  # fmt: skip
