"""The record of a model family: the forms of a layer's parts, the fields of `config.json`, and the
names of the tensors.

Fields and names follow the transformers library (https://github.com/huggingface/transformers,
`models/`). Defaults are LLaMA's (Touvron et al. 2023); `maxbatch.families.matrices` has the
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxbatch.families.forms.attention import GROUPED, AttentionForm
from maxbatch.families.forms.embedding import EMBEDDING, Embedding
from maxbatch.families.forms.endings import Ending
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import Form
from maxbatch.families.forms.last_layers import LastLayers
from maxbatch.families.forms.mlp import MLP, PlainOrGated
from maxbatch.families.forms.norms import RMS_BEFORE, Norms

Json = dict[str, Any]

# The modules of LLaMA's layers by our names, and those of experts as most families name them.
MODULES = {
    "embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
EXPERTS = {
    "experts.router": "mlp.gate", "experts.expert_gate": "mlp.experts.{expert}.gate_proj",
    "experts.expert_up": "mlp.experts.{expert}.up_proj", "experts.expert_down": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
GEMMA_MODULES = {
    **MODULES, "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its names, the forms of the parts of its layers, and the fields that correspond to
    our keys.
    """

    decoder_block: str
    model_type: str  # in the transformers library
    architecture: str  # the class of its causal language model
    # The forms of the parts of a layer (`maxbatch.families.forms`).
    # of all layers, or of the last one of each cycle
    attention: AttentionForm = GROUPED
    attention_before: AttentionForm | None = None  # of the other layers of a cycle
    mlp: PlainOrGated = MLP
    experts: Experts | None = None  # in place of the MLP, or beside it
    norms: Norms = RMS_BEFORE
    embedding: Embedding = EMBEDDING
    endings: tuple[Ending, ...] = ()  # of a layer, in order
    last_layers: LastLayers | None = None  # the last ones of the decoder, if they differ
    # Its config.json. Defaults of missing fields are the transformers library's.
    defaults: Json = dataclasses.field(default_factory=dict)
    fixed: Json = dataclasses.field(default_factory=dict)  # fields that have no other values
    # the fields that tell it from other families of its `model_type`
    told_by: Json = dataclasses.field(default_factory=dict)
    # its own names of common fields
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # names of activations that mean others
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bias_fields: tuple[str, ...] = ()  # the fields that give its projections biases
    has_head_dim: bool = True  # whether head_dim may differ from hidden_size / num_attention_heads
    # whether windows may start at a later layer or be off (use_sliding_window)
    has_max_window_layers: bool = False
    # Its tensors. Our modules that share a name form one tensor, in the order of the table.
    # its names of ours
    modules: Mapping[str, str] = dataclasses.field(default_factory=lambda: MODULES)
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
    def forms(self) -> tuple[Form, ...]:
        """All forms of its layers' parts, in the order in which their keys are checked."""
        some = (self.experts, *self.attention_forms, self.mlp, self.last_layers, *self.endings)
        return (*(form for form in some if form is not None), self.norms, self.embedding)

    @property
    def own_keys(self) -> tuple[str, ...]:
        """The config keys of forms that only some families have."""
        return tuple(dict.fromkeys(key for form in self.forms for key in form.keys))

    @property
    def has_cycle(self) -> bool:
        """Whether its layers may have several forms, which they repeat as a cycle."""
        return self.attention.has_global_heads or any(form.steps for form in self.forms)
