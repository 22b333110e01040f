"""Fields of published models' `config.json` files that determine the model, and parameter
counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """The fields of a published model's `config.json`, and the number of its parameters."""

    fields: dict[str, Any]
    num_parameters: int


def _shape(
    kind: str, width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
    }  # fmt: skip


def _llama3(factor: float, **shape: int) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    common = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
    }
    return (
        _shape("llama", **shape, kv_heads=8, vocab=128256)
        | common
        | {"max_position_embeddings": 131072}
    )


def _smollm2(theta: int, **shape: int) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-5, "rope_theta": theta, "tie_word_embeddings": True}
    return _shape("llama", **shape, vocab=49152) | common


def _qwen2(tied: bool, **shape: int) -> dict[str, Any]:
    windows = {
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": shape["layers"],
    }
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": tied}
    return _shape("qwen2", **shape) | common | windows


def _qwen3(tied: bool, **shape: int) -> dict[str, Any]:
    common = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
    }
    windows = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape["layers"],
    }
    return _shape("qwen3", **shape, kv_heads=8, vocab=151936) | common | windows


def _gemma(**shape: int) -> dict[str, Any]:
    return _shape("gemma", **shape, vocab=256000) | {
        "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "gelu",
    }  # fmt: skip


def _gemma2(**shape: int) -> dict[str, Any]:
    return _shape("gemma2", **shape, vocab=256000) | {
        "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(window: int, **shape: int) -> dict[str, Any]:
    return _shape("gemma3_text", **shape) | {
        "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "sliding_window": window, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024,
        "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    }  # fmt: skip


def _mixtral(**shape: int) -> dict[str, Any]:
    return _shape("mixtral", **shape, kv_heads=8, vocab=32000) | {
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip


def _qwen3_moe(expert: int, **shape: int) -> dict[str, Any]:
    common = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
    }
    windows = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape["layers"],
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True,
               "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    return _shape("qwen3_moe", **shape, kv_heads=4, vocab=151936) | common | windows | experts


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _shape("gpt_oss", 2880, 2880, layers, 64, 8, 201088) | {
        "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False,
        "attention_bias": True, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128,
        "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip


_OLMOE = _shape("olmoe", 2048, 1024, 16, 16, 16, 50304) | {
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None,
}  # fmt: skip
_MISTRAL = _shape("mistral", 4096, 14336, 32, 32, 8, 32000) | {
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_OLMO2 = _shape("olmo2", 4096, 11008, 32, 32, 32, 100352) | {
    "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
_OLMO3 = _shape("olmo3", 4096, 11008, 32, 32, 32, 100278) | {
    "rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False, "sliding_window": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
_PHI3 = _shape("phi3", 3072, 8192, 32, 32, 32, 32064) | {
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 2047,
    "tie_word_embeddings": False,
}  # fmt: skip


def _deepseek(
    width: int, mlp: int, moe_mlp: int, layers: int, heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3", "hidden_size": width, "intermediate_size": mlp, "moe_intermediate_size": moe_mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


_DEEPSEEK3 = _deepseek(7168, 18432, 2048, 61, 128, 129280) | {
    "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_MOONLIGHT = _deepseek(2048, 11264, 1408, 27, 16, 163840) | {
    "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "rope_scaling": None,
}  # fmt: skip

# By the names of our presets.
PUBLISHED: dict[str, Published] = {
    "llama3.1-8b": Published(
        _llama3(8.0, width=4096, mlp=14336, layers=32, heads=32), 8_030_261_248
    ),
    "llama3.1-70b": Published(
        _llama3(8.0, width=8192, mlp=28672, layers=80, heads=64), 70_553_706_496
    ),
    "llama3.2-1b": Published(
        _llama3(32.0, width=2048, mlp=8192, layers=16, heads=32)
        | {"head_dim": 64, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "llama3.2-3b": Published(
        _llama3(32.0, width=3072, mlp=8192, layers=28, heads=24)
        | {"head_dim": 128, "tie_word_embeddings": True},
        3_212_749_824,
    ),
    "qwen2.5-0.5b": Published(
        _qwen2(True, width=896, mlp=4864, layers=24, heads=14, kv_heads=2, vocab=151936),
        494_032_768,
    ),
    "qwen2.5-1.5b": Published(
        _qwen2(True, width=1536, mlp=8960, layers=28, heads=12, kv_heads=2, vocab=151936),
        1_543_714_304,
    ),
    "qwen2.5-7b": Published(
        _qwen2(False, width=3584, mlp=18944, layers=28, heads=28, kv_heads=4, vocab=152064),
        7_615_616_512,
    ),
    "qwen3-0.6b": Published(_qwen3(True, width=1024, mlp=3072, layers=28, heads=16), 596_049_920),
    "qwen3-4b": Published(_qwen3(True, width=2560, mlp=9728, layers=36, heads=32), 4_022_468_096),
    "qwen3-8b": Published(_qwen3(False, width=4096, mlp=12288, layers=36, heads=32), 8_190_735_360),
    "gemma-2b": Published(
        _gemma(width=2048, mlp=16384, layers=18, heads=8, kv_heads=1), 2_506_172_416
    ),
    "gemma-7b": Published(
        _gemma(width=3072, mlp=24576, layers=28, heads=16, kv_heads=16), 8_537_680_896
    ),
    "gemma2-2b": Published(
        _gemma2(width=2304, mlp=9216, layers=26, heads=8, kv_heads=4), 2_614_341_888
    ),
    "gemma2-9b": Published(
        _gemma2(width=3584, mlp=14336, layers=42, heads=16, kv_heads=8), 9_241_705_984
    ),
    "gemma3-1b": Published(
        _gemma3(512, width=1152, mlp=6912, layers=26, heads=4, kv_heads=1, vocab=262144),
        999_885_952,
    ),
    "gemma3-4b": Published(
        _gemma3(1024, width=2560, mlp=10240, layers=34, heads=8, kv_heads=4, vocab=262208)
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        3_880_263_168,
    ),
    "mistral-7b": Published(_MISTRAL, 7_241_732_096),
    "mixtral-8x7b": Published(_mixtral(width=4096, mlp=14336, layers=32, heads=32), 46_702_792_704),
    "mixtral-8x22b": Published(
        _mixtral(width=6144, mlp=16384, layers=56, heads=48), 140_620_634_112
    ),
    "qwen3-30b-a3b": Published(
        _qwen3_moe(768, width=2048, mlp=6144, layers=48, heads=32), 30_532_122_624
    ),
    "qwen3-235b-a22b": Published(
        _qwen3_moe(1536, width=4096, mlp=12288, layers=94, heads=64), 235_093_634_560
    ),
    "gpt-oss-20b": Published(_gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": Published(_gpt_oss(36, 128), 116_829_156_672),
    "olmoe-1b-7b": Published(_OLMOE, 6_919_161_856),
    "deepseek3-671b": Published(_DEEPSEEK3, 671_026_419_200),
    "moonlight-16b-a3b": Published(_MOONLIGHT, 15_960_110_208),
    "olmo2-7b": Published(_OLMO2, 7_298_617_344),
    "olmo3-7b": Published(_OLMO3, 7_298_011_136),
    "phi3-mini": Published(_PHI3, 3_821_079_552),
    "smollm2-135m": Published(
        _smollm2(100000, width=576, mlp=1536, layers=30, heads=9, kv_heads=3), 134_515_008
    ),
    "smollm2-360m": Published(
        _smollm2(100000, width=960, mlp=2560, layers=32, heads=15, kv_heads=5), 361_821_120
    ),
    "smollm2-1.7b": Published(
        _smollm2(130000, width=2048, mlp=8192, layers=24, heads=32, kv_heads=32), 1_711_376_384
    ),
    "gpt2": Published(_gpt2(768, 12, 12), 124_439_808),
    "gpt2-medium": Published(_gpt2(1024, 24, 16), 354_823_168),
    "gpt2-large": Published(_gpt2(1280, 36, 20), 774_030_080),
    "gpt2-xl": Published(_gpt2(1600, 48, 25), 1_557_611_200),
}
