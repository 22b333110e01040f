"""Model families, one record each; a family whose layers have a form of their own is a file."""

from __future__ import annotations

import dataclasses

from maxbatch.families.deepseek import DEEPSEEK
from maxbatch.families.forms.attention import GroupedAttention
from maxbatch.families.forms.embedding import Embedding
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import Form
from maxbatch.families.forms.mlp import PlainOrGated
from maxbatch.families.forms.norms import Norms
from maxbatch.families.gemma4 import GEMMA4, GEMMA4_SMALL
from maxbatch.families.llama4 import LLAMA4
from maxbatch.families.qwen3_next import QWEN3_5, QWEN3_NEXT
from maxbatch.families.record import EXPERTS, GEMMA_MODULES, MODULES, Family, Json

_LLAMA = Family(
    decoder_block="llama2", model_type="llama", architecture="LlamaForCausalLM",
    bias_fields=("attention_bias", "mlp_bias"),
)  # fmt: skip
_MISTRAL = Family(
    decoder_block="mistral", model_type="mistral", architecture="MistralForCausalLM",
    attention=GroupedAttention(local_every=1), defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)  # fmt: skip
_QWEN2 = Family(
    decoder_block="qwen2", model_type="qwen2", architecture="Qwen2ForCausalLM",
    attention=GroupedAttention(has_input_biases=True), has_head_dim=False, has_max_window_layers=True,
)  # fmt: skip
_QWEN3 = Family(
    decoder_block="qwen3", model_type="qwen3", architecture="Qwen3ForCausalLM",
    attention=GroupedAttention(has_qk_norm=True), defaults={"head_dim": 128}, bias_fields=("attention_bias",),
    has_max_window_layers=True,
)  # fmt: skip
_GEMMA_DEFAULTS: Json = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA = Family(
    decoder_block="gemma", model_type="gemma", architecture="GemmaForCausalLM",
    norms=Norms(add_one=True), embedding=Embedding(is_scaled=True),
    defaults={
        "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
    },
    activations={"gelu": "gelu_pytorch_tanh"}, bias_fields=("attention_bias",),
)  # fmt: skip
_GEMMA2 = Family(
    decoder_block="gemma2", model_type="gemma2", architecture="Gemma2ForCausalLM",
    norms=Norms(add_one=True, are_after=True), embedding=Embedding(is_scaled=True, caps_logits=True),
    attention=GroupedAttention(caps_scores=True, local_every=2),
    defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fields={"hidden_act": "hidden_activation"}, bias_fields=("attention_bias",), modules=GEMMA_MODULES,
)  # fmt: skip
_GEMMA3 = dataclasses.replace(
    _GEMMA2, decoder_block="gemma3", model_type="gemma3_text", architecture="Gemma3ForCausalLM",
    attention=GroupedAttention(has_qk_norm=True, caps_scores=True, local_every=6),
    defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
)  # fmt: skip
_OLMO2 = Family(
    decoder_block="olmo2", model_type="olmo2", architecture="Olmo2ForCausalLM",
    norms=Norms(are_before=False, are_after=True),
    attention=GroupedAttention(has_qk_norm=True, qk_norm_over="heads"),
    defaults={"rms_norm_eps": 1e-5}, bias_fields=("attention_bias",), has_head_dim=False,
    modules={
        **MODULES, "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    },
)  # fmt: skip
# In transformers YaRN scales its global layers alone, and the base of the others has no field of
# its own.
_OLMO3 = dataclasses.replace(
    _OLMO2, decoder_block="olmo3", model_type="olmo3", architecture="Olmo3ForCausalLM",
    attention=GroupedAttention(has_qk_norm=True, qk_norm_over="heads", local_every=4),
    defaults={
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0,
        "rope_parameters": {"sliding_attention": {"rope_theta": 500000.0}},
    },
)  # fmt: skip
_PHI3 = Family(
    decoder_block="phi3", model_type="phi3", architecture="Phi3ForCausalLM",
    attention=GroupedAttention(local_every=1), defaults={"rms_norm_eps": 1e-5}, has_head_dim=False,
    modules={
        **MODULES, "attention.query": "self_attn.qkv_proj", "attention.key": "self_attn.qkv_proj",
        "attention.value": "self_attn.qkv_proj", "mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj",
    },
)  # fmt: skip
_GPT2 = Family(
    decoder_block="gpt2", model_type="gpt2", architecture="GPT2LMHeadModel",
    norms=Norms(kind="layer"), mlp=PlainOrGated(has_gate=False, has_biases=True),
    attention=GroupedAttention(has_rope=False, has_input_biases=True, has_out_bias=True),
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    fields={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
    },
    has_head_dim=False,
    modules={
        "embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f",
        "output": "lm_head", "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.query": "attn.c_attn",
        "attention.key": "attn.c_attn", "attention.value": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    layer="transformer.h.{layer}", inputs_first=True, prefix="transformer.",
)  # fmt: skip

_MIXTRAL = Family(
    decoder_block="mixtral", model_type="mixtral", architecture="MixtralForCausalLM",
    experts=Experts(always_normalise=True), attention=GroupedAttention(local_every=1),
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2,
    },
    fields={"num_experts": "num_local_experts"},
    modules={
        **MODULES, "experts.router": "block_sparse_moe.gate",
        "experts.expert_gate": "block_sparse_moe.experts.{expert}.w1",
        "experts.expert_up": "block_sparse_moe.experts.{expert}.w3",
        "experts.expert_down": "block_sparse_moe.experts.{expert}.w2",
    },
)  # fmt: skip
_QWEN3_MOE = Family(
    decoder_block="qwen3_moe", model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    experts=Experts(), attention=GroupedAttention(has_qk_norm=True),
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    bias_fields=("attention_bias",), has_max_window_layers=True, modules={**MODULES, **EXPERTS},
)  # fmt: skip
_OLMOE = Family(
    decoder_block="olmoe", model_type="olmoe", architecture="OlmoeForCausalLM",
    experts=Experts(), attention=GroupedAttention(has_qk_norm=True, qk_norm_over="heads"),
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    bias_fields=("attention_bias",), has_head_dim=False, modules={**MODULES, **EXPERTS},
)  # fmt: skip
_GPT_OSS = Family(
    decoder_block="gpt_oss", model_type="gpt_oss", architecture="GptOssForCausalLM",
    experts=Experts(have_biases=True, limit=7.0, always_normalise=True),
    attention=GroupedAttention(has_sinks=True, local_every=2),
    defaults={
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
        "num_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    fields={"num_experts": "num_local_experts"}, bias_fields=("attention_bias",),
    modules={**MODULES, "experts.router": "mlp.router"},
    tensors={
        "attention.sinks": "self_attn.sinks",
        "experts.expert_gate": "mlp.experts.gate_up_proj", "experts.expert_up": "mlp.experts.gate_up_proj",
        "experts.expert_down": "mlp.experts.down_proj", "experts.expert_down_bias": "mlp.experts.down_proj_bias",
        "experts.expert_gate_bias": "mlp.experts.gate_up_proj_bias",
        "experts.expert_up_bias": "mlp.experts.gate_up_proj_bias",
    },
)  # fmt: skip

DEFAULT_FAMILY = _LLAMA.decoder_block  # when a config names no family
# By `decoder_block`.
FAMILIES: dict[str, Family] = {family.decoder_block: family for family in (
    _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA, _GEMMA2, _GEMMA3, GEMMA4, GEMMA4_SMALL, _OLMO2, _OLMO3, _PHI3, _GPT2,
    _MIXTRAL, _QWEN3_MOE, _OLMOE, _GPT_OSS, DEEPSEEK, LLAMA4, QWEN3_NEXT, QWEN3_5,
)}  # fmt: skip
# By the `model_type` of a `config.json`; it may have several families.
MODEL_TYPES: dict[str, tuple[Family, ...]] = {
    name: tuple(family for family in FAMILIES.values() if family.model_type == name)
    for name in dict.fromkeys(family.model_type for family in FAMILIES.values())
}
# All forms that families have.
FORMS: tuple[Form, ...] = tuple(
    dict.fromkeys(form for family in FAMILIES.values() for form in family.forms)
)
