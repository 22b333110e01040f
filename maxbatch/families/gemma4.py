"""Gemma 4: heads that only global layers have; in its small models an input of each layer besides the
stream, and last layers that take the keys and values of layers before them.

Source: transformers, `models/gemma4` and `models/gemma3n` ("per-layer embeddings").
"""

from __future__ import annotations

import dataclasses
from typing import Any

from maxbatch.families.forms.attention import GroupedAttention
from maxbatch.families.forms.embedding import Embedding
from maxbatch.families.forms.endings import LAYER_SCALE, Ending
from maxbatch.families.forms.experts import Experts
from maxbatch.families.forms.form import NormRows, TinySizes
from maxbatch.families.forms.last_layers import LastLayers
from maxbatch.families.forms.norms import Norms
from maxbatch.families.parameter import ModelKeys, Parameter
from maxbatch.families.record import GEMMA_MODULES, Family

# No config key states the width, since all published models have this one.
WIDTH = 256


class LayerInputs(Ending):
    """A table with numbers of each token for each layer; they join the stream through a gate."""

    layer = "maxbatch.model.layer_inputs:joined"
    norms = ("input_norm",)
    module = "layer_inputs"
    makes_inputs = "maxbatch.model.layer_inputs:LayerInputs"
    over_tensor = ("gated_input",)
    whole = ("input_layers",)
    in_float32 = ("input_norm",)
    looked_up = ("layer_input",)
    values_beside = WIDTH
    no_pipeline = "whose layers have inputs besides the stream"

    def rows(self, stack: str, norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the gate, the projection to the stream, and their norm."""
        return (
            Parameter(f"{stack}.input_gate", ("gated_input",), ("embed",)),
            Parameter(f"{stack}.input_out", ("embed",), ("gated_input",)),
            *norm(f"{stack}.input_norm"),
        )

    def rows_outside(self, norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the table of all tokens and layers, and a projection of the embedding."""
        of_layers = ("input_layers", "layer_input")
        return (
            Parameter(f"{self.module}.embedding", of_layers, ("vocab",), is_lookup=True),
            Parameter(f"{self.module}.projection", of_layers, ("embed",)),
            *norm(f"{self.module}.norm", "input_norm"),
        )

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the number of layers, and the width of an input."""
        return {
            "input_layers": model.base_num_decoder_layers,
            **dict.fromkeys(("layer_input", "gated_input", "input_norm"), WIDTH),
        }


LAYER_INPUTS = LayerInputs()


class SharedKeys(LastLayers):
    """Last layers without keys and values of their own, whose MLPs may be wider."""

    keys = ("num_kv_shared_layers", "use_double_wide_mlp")
    over_tensor = ("kv_shared_mlp",)
    hidden = "kv_shared_mlp"

    def num_layers(self, model: ModelKeys) -> int:
        """Returns the number of these layers."""
        return int(model.num_kv_shared_layers)

    def hidden_times(self, model: ModelKeys) -> int:
        """Returns 2 for wider MLPs."""
        return 2 if model.use_double_wide_mlp else 1

    def in_cycles(
        self, config: ModelKeys, layers: int, length: int, rule: str, works: dict[str, object]
    ) -> tuple[str, dict[str, object]]:
        """Adds whole cycles of these layers that leave other layers."""
        last = config.num_kv_shared_layers
        if last % length or last >= layers:
            rule += "" if works else f", below base_num_decoder_layers={layers}"
            last = min(round(last / length), layers // length - 1) * length
            works = {**works, "num_kv_shared_layers": last}
        if config.use_double_wide_mlp and not last:
            if not works:
                rule = "false beside num_kv_shared_layers=0: no layer would have it"
            works = {**works, "use_double_wide_mlp": "false"}
        return rule, works

    def small_keys(self, config: ModelKeys, sizes: TinySizes) -> dict[str, Any]:
        """Returns as many of these layers as there are others."""
        if not config.num_kv_shared_layers:
            return {}
        return {
            "num_kv_shared_layers": sizes.layers,
            "base_num_decoder_layers": max(2, 2 * sizes.layers),
        }


SHARED_KEYS = SharedKeys()

_ATTENTION = GroupedAttention(
    has_global_heads=True,
    shares_kv_projections=True,
    has_value_norm=True,
    has_qk_norm=True,
    caps_scores=True,
    local_every=6,
)

# transformers keep `layer_scalar` as a buffer, which they do not train; MaxText and maxbatch train
# it.
GEMMA4 = Family(
    decoder_block="gemma4", model_type="gemma4_text", architecture="Gemma4ForCausalLM",
    norms=Norms(are_after=True), embedding=Embedding(is_scaled=True, caps_logits=True), endings=(LAYER_SCALE,),
    experts=Experts(always_normalise=True, are_beside_mlp=True),
    attention=_ATTENTION,
    told_by={"hidden_size_per_layer_input": 0},
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
    bias_fields=("attention_bias",),
    modules={
        **GEMMA_MODULES, "mlp_own_norm": "post_feedforward_layernorm_1",
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
GEMMA4_SMALL = dataclasses.replace(
    GEMMA4, decoder_block="gemma4_small", experts=None, last_layers=SHARED_KEYS,
    attention=dataclasses.replace(_ATTENTION, shares_kv_projections=False), endings=(LAYER_INPUTS, LAYER_SCALE),
    told_by={"hidden_size_per_layer_input": 256},
    modules={
        **GEMMA_MODULES,
        "layer_inputs.embedding": "model.embed_tokens_per_layer",
        "layer_inputs.projection": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm", "input_gate": "per_layer_input_gate",
        "input_out": "per_layer_projection", "input_norm": "post_per_layer_input_norm",
    },
    tensors={"layer_scale": "layer_scalar"},
)  # fmt: skip
