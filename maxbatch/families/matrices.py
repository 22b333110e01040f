"""The parameters of a decoder, as a table with one row per parameter.

Shapes, counts, FLOPs, initial values, partitions, the matrices of Muon and LoRA, the products that
rematerialisation keeps and the tensors of Hugging Face folders follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache

from maxbatch.config.sections import ModelConfig
from maxbatch.families.cycle import LayerForm, cycle_length, cycle_of, possible_forms
from maxbatch.families.family import ATTENTION_FORMS, FAMILIES
from maxbatch.families.parameter import (
    DENSE_LAYERS,
    KV_SHARED_LAYERS,
    LAYERS,
    STACKS,
    Parameter,
    ParameterPath,
)

ROUTED_BIAS = "routed_bias"  # moved by `routed_bias_update_rate`, not by the optimizer
# Axes of vectors that are computed in float32.
NORMS = ("norm", "input_norm", *(axis for form in ATTENTION_FORMS for axis in form.in_float32))

# Matrices by their names in Hugging Face's models of LLaMA's form, which PEFT's adapters take.
OF_PEFT = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def shape_of(row: Parameter, model: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of a parameter, in one layer."""
    sizes = axis_sizes(model)
    return tuple(sizes[axis] for axis in row.axes)


def size_of(row: Parameter, model: ModelConfig) -> int:
    """Returns the number of values of a parameter, in all layers."""
    layers = num_stacked(model, row.path[0]) if row.is_stacked else 1
    return math.prod(shape_of(row, model)) * layers


def active_size_of(row: Parameter, model: ModelConfig) -> int:
    """Returns the number of values of a parameter that a token uses, in all layers."""
    size = size_of(row, model)
    return size // model.num_experts * model.num_experts_per_tok if row.per_expert else size


def axis_sizes(model: ModelConfig) -> dict[str, int]:
    """Returns the size of each logical axis."""
    return {
        "vocab": model.vocab_size,
        "position": model.trainable_position_size,
        "embed": model.base_emb_dim,
        "norm": model.base_emb_dim,
        "heads": model.base_num_query_heads,
        "kv_heads": model.base_num_kv_heads,
        "head_dim": model.head_dim,
        "global_head_dim": global_head_dim(model),
        "global_kv_heads": model.global_num_kv_heads or model.base_num_kv_heads,
        "layer": 1,
        "mlp": model.base_mlp_dim,
        "experts": model.num_experts,
        "kv_shared_mlp": model.base_mlp_dim * (2 if model.use_double_wide_mlp else 1),
        "input_layers": model.base_num_decoder_layers,
        **dict.fromkeys(
            ("layer_input", "gated_input", "input_norm"),
            FAMILIES[model.decoder_block].layer_input_width,
        ),
        "router": model.num_experts,
        "moe_mlp": moe_mlp_dim(model),
        "shared_mlp": model.shared_experts * moe_mlp_dim(model),
        "shared_gate": 1,
        **{axis: size for form in ATTENTION_FORMS for axis, size in form.axis_sizes(model).items()},
    }


def num_layers(model: ModelConfig, stack: str = LAYERS) -> int:
    first, last = model.first_num_dense_layers, model.num_kv_shared_layers
    sizes = {
        DENSE_LAYERS: first,
        LAYERS: model.base_num_decoder_layers - first - last,
        KV_SHARED_LAYERS: last,
    }
    return sizes[stack]


def first_layer(model: ModelConfig, stack: str) -> int:
    """Returns the number of a stack's first layer."""
    return sum(num_layers(model, before) for before in STACKS[: STACKS.index(stack)])


def num_stacked(model: ModelConfig, stack: str = LAYERS) -> int:
    """Returns the size of a stack's leading axis: its layers, or cycles of layers."""
    return num_layers(model, stack) // (1 if stack == DENSE_LAYERS else cycle_length(model))


def layer_paths(model: ModelConfig, stack: str = LAYERS) -> tuple[ParameterPath, ...]:
    """Returns the path of each place in the cycle of a stack, in order; without a cycle, the path
    of all its layers.
    """
    return _paths(cycle_of(model), stack)


def _paths(cycle: tuple[LayerForm, ...], stack: str) -> tuple[ParameterPath, ...]:
    return tuple((stack, str(place)) for place in range(len(cycle))) if cycle[1:] else ((stack,),)


def num_sparse_layers(model: ModelConfig) -> int:
    """Returns the layers that have experts."""
    return num_stacked(model) * sum(form.has_experts for form in cycle_of(model))


def attention_widths(model: ModelConfig, is_local: bool = False) -> tuple[int, int]:
    """Returns the width of a head's query and key, and the width of its value, in local or in
    global layers.
    """
    return FAMILIES[model.decoder_block].attention.widths(model, is_local)


def global_head_dim(model: ModelConfig) -> int:
    """Returns the width of a head in global layers, without latents."""
    is_wide = FAMILIES[model.decoder_block].attention.has_global_heads
    return 2 * model.head_dim if is_wide else model.head_dim


def weight_factor(model: ModelConfig, path: ParameterPath) -> float:
    """Returns the factor on a parameter's usual value in a model whose query weights hold the scale
    of scores, or whose embedding holds its factor.
    """
    if model.gemma_weights_scaled and path == ("embedding",):
        return math.sqrt(model.base_emb_dim)
    if not model.query_weights_scaled or path[-1] not in ("query", "query_bias"):
        return 1.0
    return 1 / math.sqrt(model.query_pre_attn_scalar or model.head_dim)


def weight_offset(model: ModelConfig, path: ParameterPath) -> float:
    """Returns the offset of a parameter from its usual value in a model whose norms hold 1 + scale."""
    holds_one = FAMILIES[model.decoder_block].norm_adds_one and not norms_add_one(model)
    return 1.0 if holds_one and path[-1] == "scale" else 0.0


def norms_add_one(model: ModelConfig) -> bool:
    """Returns whether a norm multiplies by 1 + scale."""
    return FAMILIES[model.decoder_block].norm_adds_one and not model.gemma_weights_scaled


def moe_mlp_dim(model: ModelConfig) -> int:
    """Returns the hidden width of an expert."""
    return model.base_mlp_dim if model.base_moe_mlp_dim == -1 else model.base_moe_mlp_dim


def is_gated(model: ModelConfig) -> bool:
    """Returns whether the MLP multiplies an activated projection with a linear one."""
    return model.mlp_activations.endswith(",linear")


@cache
def _table(decoder_block: str, cycle: tuple[LayerForm, ...]) -> tuple[Parameter, ...]:
    """Returns a family's possible parameters with layers of these forms, in the order of their
    creation.
    """
    family = FAMILIES[decoder_block]

    def norm(name: str, axis: str = "norm") -> tuple[Parameter, ...]:
        weights = ("scale", "bias") if family.norm == "layer" else ("scale",)
        return tuple(Parameter(f"{name}.{part}", (axis,)) for part in weights)

    def has_mlp_bias(model: ModelConfig) -> bool:
        return model.mlp_projection_bias or family.has_mlp_biases

    def mlp_rows(mlp: str, hidden: str = "mlp") -> tuple[Parameter, ...]:
        return (
            Parameter(f"{mlp}.gate", (hidden,), ("embed",), kept="mlpwi_0", has=is_gated),
            # without a gate, the name of the gate
            Parameter(f"{mlp}.up", (hidden,), ("embed",), kept="mlpwi_1"),
            Parameter(f"{mlp}.down", ("embed",), (hidden,), kept="mlpwo"),
            Parameter(f"{mlp}.gate_bias", (hidden,), has=lambda m: is_gated(m) and has_mlp_bias(m)),
            Parameter(f"{mlp}.up_bias", (hidden,), has=has_mlp_bias),
            Parameter(f"{mlp}.down_bias", ("norm",), has=has_mlp_bias),
        )

    def shared_rows(shared: str) -> tuple[Parameter, ...]:
        def has(model: ModelConfig) -> bool:
            return model.shared_experts > 0

        return (
            Parameter(f"{shared}.gate", ("shared_mlp",), ("embed",), kept="mlpwi_0", has=has),
            Parameter(f"{shared}.up", ("shared_mlp",), ("embed",), kept="mlpwi_1", has=has),
            Parameter(f"{shared}.down", ("embed",), ("shared_mlp",), kept="mlpwo", has=has),
            *(
                (Parameter(f"{shared}.shared_gate", ("shared_gate",), ("embed",), has=has),)
                if family.has_shared_gate
                else ()
            ),
        )

    def experts_rows(experts: str) -> tuple[Parameter, ...]:
        biases = (
            Parameter(f"{experts}.router_bias", ("router",)),
            Parameter(f"{experts}.expert_gate_bias", ("moe_mlp",), per_expert=True),
            Parameter(f"{experts}.expert_up_bias", ("moe_mlp",), per_expert=True),
            Parameter(f"{experts}.expert_down_bias", ("norm",), per_expert=True),
        )
        scales = (
            Parameter(f"{experts}.router_scale", ("norm",)),
            Parameter(f"{experts}.expert_scale", ("router",)),
        )
        return (
            Parameter(f"{experts}.router", ("router",), ("embed",)),
            Parameter(
                f"{experts}.expert_gate",
                ("moe_mlp",),
                ("embed",),
                per_expert=True,
                kept="moe_mlpwi_0",
            ),
            Parameter(
                f"{experts}.expert_up",
                ("moe_mlp",),
                ("embed",),
                per_expert=True,
                kept="moe_mlpwi_1",
            ),
            Parameter(
                f"{experts}.expert_down",
                ("embed",),
                ("moe_mlp",),
                per_expert=True,
                kept="moe_mlpwo",
            ),
            *(biases if family.has_expert_biases else ()),
            *(scales if family.has_experts_beside_mlp else ()),
            Parameter(
                f"{experts}.{ROUTED_BIAS}",
                ("router",),
                is_float32=True,
                has=lambda m: m.routed_bias,
            ),
        )

    def mlp_or_experts(stack: str, has_experts: bool) -> tuple[Parameter, ...]:
        if not has_experts:
            return mlp_rows(
                f"{stack}.mlp", "kv_shared_mlp" if stack.startswith(KV_SHARED_LAYERS) else "mlp"
            )
        if not family.has_experts_beside_mlp:
            return experts_rows(f"{stack}.experts")
        return (
            *mlp_rows(f"{stack}.mlp"),
            *norm(f"{stack}.mlp_own_norm"),
            *norm(f"{stack}.experts_norm"),
            *experts_rows(f"{stack}.experts"),
            *norm(f"{stack}.experts_own_norm"),
        )

    def layer_input_rows(stack: str) -> tuple[Parameter, ...]:
        return (
            Parameter(f"{stack}.input_gate", ("gated_input",), ("embed",)),
            Parameter(f"{stack}.input_out", ("embed",), ("gated_input",)),
            *norm(f"{stack}.input_norm"),
        )

    def layer_inputs_rows() -> tuple[Parameter, ...]:
        of_layers = ("input_layers", "layer_input")
        return (
            Parameter("layer_inputs.embedding", of_layers, ("vocab",), is_lookup=True),
            Parameter("layer_inputs.projection", of_layers, ("embed",)),
            *norm("layer_inputs.norm", "input_norm"),
        )

    def layers(stack: str, form: LayerForm) -> tuple[Parameter, ...]:
        attention = form.attention.rows(f"{stack}.attention", form.is_local)
        return (
            *(norm(f"{stack}.attention_norm") if family.norms_before else ()),
            *attention,
            *(norm(f"{stack}.attention_post_norm") if family.norms_after == "both" else ()),
            *(norm(f"{stack}.mlp_norm") if family.norms_before else ()),
            *mlp_or_experts(stack, form.has_experts),
            *(
                shared_rows(f"{stack}.shared_experts")
                if "shared_experts" in family.own_keys and form.has_experts
                else ()
            ),
            *(norm(f"{stack}.mlp_post_norm") if family.norms_after == "both" else ()),
            *(layer_input_rows(stack) if family.layer_input_width else ()),
            *((Parameter(f"{stack}.layer_scale", ("layer",)),) if family.has_layer_scale else ()),
        )

    def of_cycle(stack: str) -> tuple[Parameter, ...]:
        places = zip(_paths(cycle, stack), cycle, strict=True)
        return tuple(row for path, form in places for row in layers(".".join(path), form))

    def if_any(rows: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        def owned(row: Parameter) -> Parameter:
            return dataclasses.replace(
                row, has=lambda m: num_layers(m, row.path[0]) > 0 and row.has(m)
            )

        return tuple(map(owned, rows))

    without_experts = LayerForm(family.attention, has_experts=False)
    has_dense = "first_num_dense_layers" in family.own_keys
    dense = layers(DENSE_LAYERS, without_experts) if has_dense else ()
    return (
        Parameter("embedding", ("embed",), ("vocab",), is_lookup=True),
        Parameter(
            "positions",
            ("embed",),
            ("position",),
            is_lookup=True,
            has=lambda m: m.trainable_position_size > 0,
        ),
        *(layer_inputs_rows() if family.layer_input_width else ()),
        *if_any(dense),
        *of_cycle(LAYERS),
        *(if_any(of_cycle(KV_SHARED_LAYERS)) if "num_kv_shared_layers" in family.own_keys else ()),
        *norm("final_norm"),
        Parameter("output", ("vocab",), ("embed",), has=lambda m: not m.logits_via_embedding),
    )


# Possible parameters, by `decoder_block`, with one layer of each form.
TABLES: dict[str, tuple[Parameter, ...]] = {
    name: _table(name, possible_forms(family)) for name, family in FAMILIES.items()
}
# The matrices of a layer that Muon orthogonalises and LoRA adapts, by the last part of their names.
# Embedding and output projection are left out: their rows are lookups, not a map (Jordan et al.
# 2024). A name in several families has the first family's row.
MATRICES: dict[str, Parameter] = {}
for _row in (row for table in TABLES.values() for row in table if row.is_stacked and row.is_map):
    MATRICES.setdefault(_row.path[-1], _row)


# The names by which rematerialisation keeps the products of experts.
KEPT_OF_EXPERTS = tuple(
    dict.fromkeys(
        row.kept for table in TABLES.values() for row in table if row.per_expert and row.kept
    )
)


def parameters(model: ModelConfig) -> list[Parameter]:
    """Returns the parameters of a decoder, in the order of their creation."""
    return [row for row in possible_parameters(model) if row.has(model)]


def possible_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Returns the parameters that a model of the family with the same cycle of layers may have."""
    return _table(model.decoder_block, cycle_of(model))


def model_size(model: ModelConfig) -> int:
    """Returns the number of values in a decoder's parameters, without adapters."""
    return sum(size_of(row, model) for row in parameters(model))


def active_model_size(model: ModelConfig) -> int:
    """Returns the number of values that a token uses: all, except the experts that it is not routed
    to.
    """
    return sum(active_size_of(row, model) for row in parameters(model))


def of_experts(name: str) -> bool:
    """Returns whether a matrix of a layer, by the last part of its name, belongs to experts or to
    their router.
    """
    return MATRICES[name].path[-2] == "experts"
