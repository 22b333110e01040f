"""Tiny random models of transformers, one or more per family, every norm and bias moved off its
first value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 300
WINDOW = 7
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
# as Llama 4's, which stretches no pair in part
SHARP_ROPE = LLAMA3_ROPE | {"high_freq_factor": 1.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.5],
             "long_factor": [1.0, 2.5, 4.0, 6.0]}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
GEMMA4: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
# Two cycles of layers with keys and values of their own, and two of layers that share the last of
# them.
GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4, "attention_k_eq_v": False,
    "num_global_key_value_heads": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "routed_scaling_factor": 1.7,
    "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 40, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "floor_scale": 5,
    "attention_chunk_size": WINDOW, "no_rope_layer_interval": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
DELTA_RULE: dict[str, Any] = {
    **EXPERTS, "head_dim": 16, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 6,
    "full_attention_interval": 2,
}  # fmt: skip

# The name of a model: its type and the fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma4": (
        "Gemma4Text",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_dense": ("Gemma4Text", GEMMA4 | {"num_global_key_value_heads": None}),
    "gemma4_small": ("Gemma4Text", GEMMA4 | GEMMA4_SMALL),
    "gemma4_own_keys": (
        "Gemma4Text",
        GEMMA4
        | GEMMA4_SMALL
        | {"num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": YARN_ROPE
                | {"rope_theta": 500000.0, "original_max_position_embeddings": 16},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2", {"num_key_value_heads": 4}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "norm_topk_prob": False}),
    "olmoe_normalised": ("Olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "rope_parameters": YARN_ROPE
            | {"truncate": False, "original_max_position_embeddings": 16},
        },
    ),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek_ungrouped": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_parameters": None,
            "rms_norm_eps": 1e-5,
            "n_shared_experts": 1,
        },
    ),
    "deepseek_scaled": (
        "DeepseekV3",
        DEEPSEEK
        | {"rope_parameters": DEEPSEEK["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "llama4": (
        "Llama4Text",
        LLAMA4 | {"interleave_moe_layer_step": 2, "rope_parameters": SHARP_ROPE},
    ),
    "llama4_whole": (
        "Llama4Text",
        LLAMA4 | {"attention_chunk_size": None, "use_qk_norm": False, "no_rope_layers": [1] * 4},
    ),
    "qwen3_next": ("Qwen3Next", DELTA_RULE | {"shared_expert_intermediate_size": 48}),
    "qwen3_next_biases": (
        "Qwen3Next",
        DELTA_RULE | {"num_hidden_layers": 2, "attention_bias": True},
    ),
    "qwen3_5": (
        "Qwen3_5MoeText",
        DELTA_RULE | {"full_attention_interval": 4, "linear_num_value_heads": 2},
    ),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "qwen3_biases": ("Qwen3", {"attention_bias": True}),
    "gpt2_exact": ("GPT2", {"num_key_value_heads": 4, "activation_function": "gelu"}),
    "phi3_long": (
        "Phi3",
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 32}},
    ),
    "phi3_short": (
        "Phi3",
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 48}},
    ),
}

# One of each family, for the tests that take long; qwen3_next's form is that of qwen3_5 too.
FAMILY_MODELS = (
    "llama3",
    "mistral",
    "qwen2_windows",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_small",
    "olmo2",
    "olmo3",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek",
    "llama4",
    "qwen3_next",
)


def make_model(name: str, **overrides: Any) -> Any:
    """Returns the model in float32, in evaluation mode; `overrides` are fields of its config."""
    import torch
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON | fields | overrides)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        .float()
        .eval()
    )
    with torch.no_grad():
        learned = ("e_score_correction_bias", "layer_scalar")
        buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(learned)]
        for parameter in [*model.parameters(), *buffers]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        buffer.requires_grad_(name.endswith("layer_scalar"))  # MaxText and we train it
    return model


def save_model(name: str, folder: Path, **overrides: Any) -> Any:
    """Saves the model in a few files, and returns it."""
    model = make_model(name, **overrides)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model
