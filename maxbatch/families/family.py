"""Model families, one record each: the form of a layer, the fields of `config.json`, and the names
of the tensors.

Fields and names follow the transformers library (https://github.com/huggingface/transformers,
`models/`). Defaults are LLaMA's (Touvron et al. 2023); `maxbatch.families.matrices` has the
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from maxbatch.families.forms.attention import GROUPED, AttentionForm, GroupedAttention
from maxbatch.families.forms.delta_rule import CONVOLUTION_TOKENS, DELTA_RULE
from maxbatch.families.forms.latents import LATENTS

Json = dict[str, Any]

LOCAL, GLOBAL = "local_sliding", "global"
# Facts of some families that no config key states, since all published models have these values.
# Llama 4's `floor_scale` and `attn_scale`, in `maxbatch.model.scores`
GROWTH_TOKENS, GROWTH_FACTOR = 8192, 0.1


def is_local_layer(attention_type: str, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer attends to a window only; the pattern repeats over the layers."""
    pattern = attention_type.split(",")
    return tuple(pattern[layer % len(pattern)].strip() == LOCAL for layer in range(num_layers))


_MODULES = {
    "embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its names, facts of its layers without a config key, and the fields that correspond
    to our keys.
    """

    decoder_block: str
    model_type: str  # in the transformers library
    architecture: str  # the class of its causal language model
    # The form of a layer.
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm, or LayerNorm with a bias
    norm_adds_one: bool = False  # a norm multiplies by 1 + scale
    norms_before: bool = True  # the input of attention and of the MLP is normalised
    # their outputs are normalised before they join the stream
    norms_after: Literal["none", "both"] = "none"
    scales_embedding: bool = False  # the embedding is multiplied by the root of its width
    has_mlp_biases: bool = False  # whatever mlp_projection_bias says
    has_experts: bool = False  # its MLPs are experts; a router chooses some for each token
    # its layers have several forms, and repeat a cycle of them (`maxbatch.families.cycle`)
    has_cycle: bool = False
    has_expert_biases: bool = False  # experts and router have biases
    # clips the values that an expert multiplies, with another activation
    expert_limit: float | None = None
    # normalises the weights of a token's experts, for any router scores
    always_normalises: bool = False
    # A token's scores, sigmoid, multiply the inputs of its experts; without it weights multiply
    # their outputs.
    weighs_inputs: bool = False
    # With several experts its layers have them beside the MLP: both have norms of their own before
    # they are added, and the router reads the stream through a norm, a scale of each channel and a
    # scale of each expert's weight.
    has_experts_beside_mlp: bool = False
    # a layer's output, the stream included, is multiplied by a learned number
    has_layer_scale: bool = False
    # Width of an input that each layer has besides the stream, made of the tokens and their
    # embedding; 0: none. Only this form has last layers that share keys and values
    # (`num_kv_shared_layers`).
    layer_input_width: int = 0
    # of all layers, or of the last one of each cycle
    attention: AttentionForm = GROUPED
    attention_before: AttentionForm | None = None  # of the other layers of a cycle
    # the output of the shared experts is multiplied by one number of each token
    has_shared_gate: bool = False
    own_keys: tuple[str, ...] = ()  # the config keys of forms that only some families have
    # Its config.json. Defaults of missing fields are the transformers library's.
    defaults: Json = dataclasses.field(default_factory=dict)
    fixed: Json = dataclasses.field(default_factory=dict)  # fields that have no other values
    # its own names of common fields
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # names of activations that mean others
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bias_fields: tuple[str, ...] = ()  # the fields that give its projections biases
    is_gated: bool = True  # whether its MLP has a linear projection beside the activated one
    has_qk_norm: bool = False
    has_attention_bias: bool = False  # of queries, keys and values
    has_rope: bool = True
    has_soft_caps: bool = False
    has_head_dim: bool = True  # whether head_dim may differ from hidden_size / num_attention_heads
    # whether windows may start at a later layer or be off (use_sliding_window)
    has_max_window_layers: bool = False
    # n: every n-th layer is global and the others local; 1: all are local; 0: as layer_types states
    local_every: int = 0
    # Its tensors. Our modules that share a name form one tensor, in the order of the table.
    # its names of ours
    modules: Mapping[str, str] = dataclasses.field(default_factory=lambda: _MODULES)
    # Whole tensor names, by ours. A name without an expert's number is one tensor of all experts,
    # inputs first; modules that share such a name alternate along its last axis.
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # otherwise modules that share such a name follow each other along that axis
    experts_alternate: bool = True
    expert_outputs_first: bool = False  # whether such a tensor has its outputs before its inputs
    # Modules that several of ours share head by head, and the axis of these heads: each has its
    # rows of every one.
    by_head: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: str = "model.layers.{layer}"  # prefix of a layer's module names
    # whether the matrices of its layers are [inputs, outputs] (Conv1D), not the reverse
    inputs_first: bool = False
    prefix: str = ""  # prefix of its tensors' names; older files lack it

    @property
    def attention_forms(self) -> tuple[AttentionForm, ...]:
        """The forms of attention that its layers have."""
        return (self.attention, *((self.attention_before,) if self.attention_before else ()))

    @property
    def attention_type(self) -> str:
        """The pattern of its local and global layers, in the form of the key."""
        return (
            LOCAL
            if self.local_every == 1
            else ",".join([LOCAL] * (self.local_every - 1) + [GLOBAL])
        )


_LLAMA = Family(
    decoder_block="llama2", model_type="llama", architecture="LlamaForCausalLM",
    bias_fields=("attention_bias", "mlp_bias"),
)  # fmt: skip
_MISTRAL = Family(
    decoder_block="mistral", model_type="mistral", architecture="MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096}, local_every=1,
)  # fmt: skip
_QWEN2 = Family(
    decoder_block="qwen2", model_type="qwen2", architecture="Qwen2ForCausalLM",
    has_attention_bias=True, has_head_dim=False, has_max_window_layers=True,
)  # fmt: skip
_QWEN3 = Family(
    decoder_block="qwen3", model_type="qwen3", architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128}, has_qk_norm=True, bias_fields=("attention_bias",), has_max_window_layers=True,
)  # fmt: skip
_GEMMA_DEFAULTS: Json = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_MODULES = {
    **_MODULES, "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA = Family(
    decoder_block="gemma", model_type="gemma", architecture="GemmaForCausalLM",
    norm_adds_one=True, scales_embedding=True,
    defaults={
        "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
    },
    activations={"gelu": "gelu_pytorch_tanh"}, bias_fields=("attention_bias",),
)  # fmt: skip
_GEMMA2 = Family(
    decoder_block="gemma2", model_type="gemma2", architecture="Gemma2ForCausalLM",
    norm_adds_one=True, norms_after="both", scales_embedding=True,
    defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fields={"hidden_act": "hidden_activation"}, bias_fields=("attention_bias",), has_soft_caps=True, local_every=2,
    modules=_GEMMA_MODULES,
)  # fmt: skip
_GEMMA3 = dataclasses.replace(
    _GEMMA2, decoder_block="gemma3", model_type="gemma3_text", architecture="Gemma3ForCausalLM",
    defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}, has_qk_norm=True, local_every=6,
)  # fmt: skip
# transformers keep `layer_scalar` as a buffer, which they do not train; MaxText and maxbatch train
# it.
_GEMMA4 = Family(
    decoder_block="gemma4", model_type="gemma4_text", architecture="Gemma4ForCausalLM",
    norms_after="both", scales_embedding=True, has_experts=True, has_cycle=True, always_normalises=True,
    has_experts_beside_mlp=True, has_layer_scale=True,
    attention=GroupedAttention(has_global_heads=True, shares_kv_projections=True, has_value_norm=True),
    own_keys=("global_num_kv_heads", "partial_rotary_factor"),
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512, "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh", "global_head_dim": 512, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    fields={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    bias_fields=("attention_bias",), has_qk_norm=True, has_soft_caps=True, local_every=6,
    modules={
        **_GEMMA_MODULES, "mlp_own_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2", "experts_own_norm": "post_feedforward_layernorm_2",
        "experts.router": "router.proj",
    },
    tensors={
        "layer_scale": "layer_scalar", "experts.router_scale": "router.scale",
        "experts.expert_scale": "router.per_expert_scale", "experts.expert_gate": "experts.gate_up_proj",
        "experts.expert_up": "experts.gate_up_proj", "experts.expert_down": "experts.down_proj",
    },
    experts_alternate=False, expert_outputs_first=True,
)  # fmt: skip
_GEMMA4_SMALL = dataclasses.replace(
    _GEMMA4, decoder_block="gemma4_small", has_experts=False, always_normalises=False, has_experts_beside_mlp=False,
    attention=GroupedAttention(has_global_heads=True, has_value_norm=True), layer_input_width=256,
    own_keys=(*_GEMMA4.own_keys, "num_kv_shared_layers", "use_double_wide_mlp"),
    modules={
        **_GEMMA_MODULES,
        "layer_inputs.embedding": "model.embed_tokens_per_layer",
        "layer_inputs.projection": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm", "input_gate": "per_layer_input_gate",
        "input_out": "per_layer_projection", "input_norm": "post_per_layer_input_norm",
    },
    tensors={"layer_scale": "layer_scalar"},
)  # fmt: skip
_OLMO2 = Family(
    decoder_block="olmo2", model_type="olmo2", architecture="Olmo2ForCausalLM",
    norms_before=False, norms_after="both", attention=GroupedAttention(qk_norm_over="heads"),
    defaults={"rms_norm_eps": 1e-5}, bias_fields=("attention_bias",), has_qk_norm=True, has_head_dim=False,
    modules={
        **_MODULES, "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    },
)  # fmt: skip
# In transformers YaRN scales its global layers alone, and the base of the others has no field of
# its own.
_OLMO3 = dataclasses.replace(
    _OLMO2, decoder_block="olmo3", model_type="olmo3", architecture="Olmo3ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0,
        "rope_parameters": {"sliding_attention": {"rope_theta": 500000.0}},
    },
    local_every=4,
)  # fmt: skip
_PHI3 = Family(
    decoder_block="phi3", model_type="phi3", architecture="Phi3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5}, has_head_dim=False, local_every=1,
    modules={
        **_MODULES, "attention.query": "self_attn.qkv_proj", "attention.key": "self_attn.qkv_proj",
        "attention.value": "self_attn.qkv_proj", "mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj",
    },
)  # fmt: skip
_GPT2 = Family(
    decoder_block="gpt2", model_type="gpt2", architecture="GPT2LMHeadModel",
    norm="layer", has_mlp_biases=True, attention=GroupedAttention(has_out_bias=True),
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    fields={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
    },
    is_gated=False, has_attention_bias=True, has_rope=False, has_head_dim=False,
    modules={
        "embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f",
        "output": "lm_head", "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.query": "attn.c_attn",
        "attention.key": "attn.c_attn", "attention.value": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    layer="transformer.h.{layer}", inputs_first=True, prefix="transformer.",
)  # fmt: skip

_EXPERTS = {
    "experts.router": "mlp.gate", "experts.expert_gate": "mlp.experts.{expert}.gate_proj",
    "experts.expert_up": "mlp.experts.{expert}.up_proj", "experts.expert_down": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
_MIXTRAL = Family(
    decoder_block="mixtral", model_type="mixtral", architecture="MixtralForCausalLM",
    has_experts=True, always_normalises=True,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2,
    },
    fields={"num_experts": "num_local_experts"}, local_every=1,
    modules={
        **_MODULES, "experts.router": "block_sparse_moe.gate",
        "experts.expert_gate": "block_sparse_moe.experts.{expert}.w1",
        "experts.expert_up": "block_sparse_moe.experts.{expert}.w3",
        "experts.expert_down": "block_sparse_moe.experts.{expert}.w2",
    },
)  # fmt: skip
_QWEN3_MOE = Family(
    decoder_block="qwen3_moe", model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    has_experts=True,
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    bias_fields=("attention_bias",), has_qk_norm=True, has_max_window_layers=True, modules={**_MODULES, **_EXPERTS},
)  # fmt: skip
_OLMOE = Family(
    decoder_block="olmoe", model_type="olmoe", architecture="OlmoeForCausalLM",
    has_experts=True, attention=GroupedAttention(qk_norm_over="heads"),
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    bias_fields=("attention_bias",), has_qk_norm=True, has_head_dim=False, modules={**_MODULES, **_EXPERTS},
)  # fmt: skip
_GPT_OSS = Family(
    decoder_block="gpt_oss", model_type="gpt_oss", architecture="GptOssForCausalLM",
    has_experts=True, has_expert_biases=True, expert_limit=7.0, always_normalises=True,
    attention=GroupedAttention(has_sinks=True),
    defaults={
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
        "num_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    fields={"num_experts": "num_local_experts"}, bias_fields=("attention_bias",), local_every=2,
    modules={**_MODULES, "experts.router": "mlp.router"},
    tensors={
        "attention.sinks": "self_attn.sinks",
        "experts.expert_gate": "mlp.experts.gate_up_proj", "experts.expert_up": "mlp.experts.gate_up_proj",
        "experts.expert_down": "mlp.experts.down_proj", "experts.expert_down_bias": "mlp.experts.down_proj_bias",
        "experts.expert_gate_bias": "mlp.experts.gate_up_proj_bias",
        "experts.expert_up_bias": "mlp.experts.gate_up_proj_bias",
    },
)  # fmt: skip

_DEEPSEEK = Family(
    decoder_block="deepseek", model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    has_experts=True, attention=LATENTS,
    own_keys=(
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mscale",
        "shared_experts", "first_num_dense_layers", "routed_score_func", "routed_scaling_factor", "n_routing_groups",
        "topk_routing_group",
    ),
    defaults={
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    fields={"num_experts": "n_routed_experts"},
    modules={
        **_MODULES, **_EXPERTS, "attention.query_down": "self_attn.q_a_proj",
        "attention.query_down_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
        "attention.latent": "self_attn.kv_a_proj_with_mqa", "attention.latent_norm": "self_attn.kv_a_layernorm",
        "attention.latent_up": "self_attn.kv_b_proj", "shared_experts.gate": "mlp.shared_experts.gate_proj",
        "shared_experts.up": "mlp.shared_experts.up_proj", "shared_experts.down": "mlp.shared_experts.down_proj",
    },
    tensors={"experts.routed_bias": "mlp.gate.e_score_correction_bias"},
)  # fmt: skip

_LLAMA4 = Family(
    decoder_block="llama4", model_type="llama4_text", architecture="Llama4ForCausalLM",
    has_experts=True, has_cycle=True, weighs_inputs=True,
    attention=GroupedAttention(qk_norm_over="rotated", rotates_neighbours=True),
    own_keys=(
        "interleave_moe_layer_step", "nope_layer_interval", "chunk_attn_window_size", "temperature_tuning",
        "shared_experts", "routed_score_func",
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
        **_MODULES, "experts.router": "feed_forward.router",
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

_QWEN3_NEXT = Family(
    decoder_block="qwen3_next", model_type="qwen3_next", architecture="Qwen3NextForCausalLM",
    norm_adds_one=True, has_experts=True, has_cycle=True, attention_before=DELTA_RULE,
    attention=GroupedAttention(has_query_gate=True),
    has_shared_gate=True,
    own_keys=(
        "inhomogeneous_layer_cycle_interval", "gdn_num_key_heads", "gdn_num_value_heads", "gdn_key_head_dim",
        "partial_rotary_factor", "shared_experts",
    ),
    defaults={
        "intermediate_size": 5632, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
    },
    fixed={"linear_conv_kernel_dim": CONVOLUTION_TOKENS},
    bias_fields=("attention_bias",), has_qk_norm=True,
    modules={
        **_MODULES, **_EXPERTS, "attention.query_gate": "self_attn.q_proj",
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
_QWEN3_5 = dataclasses.replace(
    _QWEN3_NEXT, decoder_block="qwen3_5", model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
    always_normalises=True,
    defaults={
        **_QWEN3_NEXT.defaults, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    },
    modules={
        **_QWEN3_NEXT.modules,
        **dict.fromkeys((f"attention.delta_{part}" for part in ("query", "key", "value")), "linear_attn.in_proj_qkv"),
        "attention.delta_gate": "linear_attn.in_proj_z", "attention.delta_rate": "linear_attn.in_proj_b",
        "attention.delta_decay": "linear_attn.in_proj_a",
    },
    by_head={"self_attn.q_proj": "heads"},
)  # fmt: skip

DEFAULT_FAMILY = _LLAMA.decoder_block  # when a config names no family
# By `decoder_block`.
FAMILIES: dict[str, Family] = {family.decoder_block: family for family in (
    _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA, _GEMMA2, _GEMMA3, _GEMMA4, _GEMMA4_SMALL, _OLMO2, _OLMO3, _PHI3, _GPT2,
    _MIXTRAL, _QWEN3_MOE, _OLMOE, _GPT_OSS, _DEEPSEEK, _LLAMA4, _QWEN3_NEXT, _QWEN3_5,
)}  # fmt: skip
# By the `model_type` of a `config.json`; it may have several families.
MODEL_TYPES: dict[str, tuple[Family, ...]] = {
    name: tuple(family for family in FAMILIES.values() if family.model_type == name)
    for name in dict.fromkeys(family.model_type for family in FAMILIES.values())
}
# All forms of attention that families have.
ATTENTION_FORMS: tuple[AttentionForm, ...] = tuple(
    dict.fromkeys(form for family in FAMILIES.values() for form in family.attention_forms)
)
