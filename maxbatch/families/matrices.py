"""The parameters of a decoder, as a table with one row per parameter.

Shapes, counts, FLOPs, initial values, partitions, the matrices of Muon and LoRA, the products that
rematerialisation keeps and the tensors of Hugging Face folders follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache

from maxbatch.config.sections import AdapterConfig, ModelConfig
from maxbatch.families.cycle import LayerForm, cycle_length, cycle_of, possible_forms
from maxbatch.families.family import FAMILIES, FORMS
from maxbatch.families.forms.form import Form
from maxbatch.families.parameter import (
    DENSE_LAYERS,
    LAST_LAYERS,
    LAYERS,
    STACKS,
    Parameter,
    ParameterPath,
)
from maxbatch.families.record import Family

# Axes of vectors that are computed in float32.
NORMS = tuple(dict.fromkeys(axis for form in FORMS for axis in form.in_float32))

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
        **{axis: size for form in forms_of(model) for axis, size in form.axis_sizes(model).items()},
    }


def forms_of(model: ModelConfig) -> tuple[Form, ...]:
    """Returns the forms of the parts of a model's layers."""
    return FAMILIES[model.decoder_block].forms


def num_layers(model: ModelConfig, stack: str = LAYERS) -> int:
    last_layers = FAMILIES[model.decoder_block].last_layers
    first, last = model.first_num_dense_layers, last_layers.num_layers(model) if last_layers else 0
    sizes = {
        DENSE_LAYERS: first,
        LAYERS: model.base_num_decoder_layers - first - last,
        LAST_LAYERS: last,
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
    """Returns the width of a head in global layers, if attention is of grouped queries."""
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
    holds_one = FAMILIES[model.decoder_block].norms.add_one and not norms_add_one(model)
    return 1.0 if holds_one and path[-1] == "scale" else 0.0


def norms_add_one(model: ModelConfig) -> bool:
    """Returns whether a norm multiplies by 1 + scale."""
    return FAMILIES[model.decoder_block].norms.add_one and not model.gemma_weights_scaled


@cache
def _table(decoder_block: str, cycle: tuple[LayerForm, ...]) -> tuple[Parameter, ...]:
    """Returns a family's possible parameters with layers of these forms, in the order of their
    creation.
    """
    family = FAMILIES[decoder_block]
    without_experts = LayerForm(family.attention, has_experts=False)
    has_dense = "first_num_dense_layers" in family.own_keys
    dense = _of_layer(family, DENSE_LAYERS, without_experts) if has_dense else ()
    last = _of_cycle(family, LAST_LAYERS, cycle) if family.last_layers else ()

    def has_positions(model: ModelConfig) -> bool:
        return model.trainable_position_size > 0

    def is_untied(model: ModelConfig) -> bool:
        return not model.logits_via_embedding

    return (
        Parameter("embedding", ("embed",), ("vocab",), is_lookup=True),
        Parameter("positions", ("embed",), ("position",), is_lookup=True, has=has_positions),
        *(row for ending in family.endings for row in ending.rows_outside(family.norms.rows)),
        *map(_if_any, dense),
        *_of_cycle(family, LAYERS, cycle),
        *map(_if_any, last),
        *family.norms.rows("final_norm"),
        Parameter("output", ("vocab",), ("embed",), has=is_untied),
    )


def _of_cycle(family: Family, stack: str, cycle: tuple[LayerForm, ...]) -> tuple[Parameter, ...]:
    """Returns the parameters of one cycle of layers in a stack."""
    places = zip(_paths(cycle, stack), cycle, strict=True)
    return tuple(row for path, form in places for row in _of_layer(family, ".".join(path), form))


def _of_layer(family: Family, stack: str, form: LayerForm) -> tuple[Parameter, ...]:
    """Returns the parameters of one layer; `stack` is its path."""
    norms = family.norms
    last = family.last_layers if stack.startswith(LAST_LAYERS) else None
    fed_forward = family.mlp.rows(f"{stack}.mlp", last.hidden if last else "mlp")
    if form.has_experts:
        assert family.experts is not None, "the layer has experts"
        fed_forward = family.experts.rows(stack, fed_forward, norms.rows)
    return (
        *norms.rows_before(f"{stack}.attention_norm"),
        *form.attention.rows(f"{stack}.attention", form.is_local),
        *norms.rows_after(f"{stack}.attention_post_norm"),
        *norms.rows_before(f"{stack}.mlp_norm"),
        *fed_forward,
        *norms.rows_after(f"{stack}.mlp_post_norm"),
        *(row for ending in family.endings for row in ending.rows(stack, norms.rows)),
    )


def _if_any(row: Parameter) -> Parameter:
    """Returns a row that only a model with layers in the row's stack has."""
    has = row.has
    return dataclasses.replace(row, has=lambda m: num_layers(m, row.path[0]) > 0 and has(m))


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


ALL_MATRICES = "all"  # of `lora_targets`

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


def adapter_size(model: ModelConfig, adapters: AdapterConfig) -> int:
    """Returns the number of values in the adapters of a model's matrices; 0 without adapters."""
    names = adapted_names(adapters)
    return adapters.lora_rank * sum(
        num_stacked(model, row.path[0]) * _adapted_rows(row, model)
        for row in parameters(model)
        if row.is_stacked and row.path[-1] in MATRICES and not of_experts(row.path[-1])
        if not names or row.path[-1] in names
    )


def _adapted_rows(row: Parameter, model: ModelConfig) -> int:
    """Returns the sum of a matrix's inputs and outputs, in one layer; 0 for another parameter of
    its name.
    """
    of_name = MATRICES[row.path[-1]]
    shape, num_inputs = shape_of(row, model), len(of_name.inputs)
    if len(shape) != len(of_name.axes):
        return 0
    return math.prod(shape[:num_inputs]) + math.prod(shape[num_inputs:])


def adapted_names(adapters: AdapterConfig) -> frozenset[str]:
    """Returns the names of `lora_targets`; empty: all matrices of the layers."""
    names = [name.strip() for name in adapters.lora_targets.split(",")]
    return frozenset() if names == [ALL_MATRICES] else frozenset(names)


def of_experts(name: str) -> bool:
    """Returns whether a matrix of a layer, by the last part of its name, belongs to experts or to
    their router.
    """
    return MATRICES[name].path[-2] == "experts"
