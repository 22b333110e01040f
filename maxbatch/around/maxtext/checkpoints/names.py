"""MaxText's parameters: the array and the place in it of each of ours, for every family that both
have.

MaxText's kernels have their inputs before their outputs, as ours do. Layers that it scans are an
axis of one array, the second; layers that it does not scan are arrays of their own. Names are those
of MaxText 0.2.5 (`src/maxtext/models/`, https://github.com/AI-Hypercomputer/maxtext).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from maxbatch.config.sections import ModelConfig
from maxbatch.families.cycle import cycle_length
from maxbatch.families.family import DEFAULT_FAMILY, FAMILIES
from maxbatch.families.matrices import (
    first_layer,
    norms_add_one,
    num_stacked,
    possible_parameters,
    weight_factor,
)
from maxbatch.families.parameter import DENSE_LAYERS, LAYERS, Parameter, ParameterPath
from maxbatch.system.errors import ConfigError

LAYER_AXIS = 1  # of an array of scanned layers, MaxText's `param_scan_axis`

# The matrices of a layer that adapters adapt, by our names.
LAYER_MATRICES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "out": "out",
    "gate": "wi_0",
    "up": "wi_1",
    "down": "wo",
}
_MLP_PARTS = ("gate", "up", "down")
_MLP = {part: f"{LAYER_MATRICES[part]}.kernel" for part in _MLP_PARTS}
_EXPERTS = {
    "experts.router": "gate.kernel",
    "experts.routed_bias": "gate.bias",
    "experts.router_bias": "gate.bias",
    **{f"experts.expert_{part}": LAYER_MATRICES[part] for part in _MLP_PARTS},
    **{f"experts.expert_{part}_bias": f"{LAYER_MATRICES[part]}_bias" for part in _MLP_PARTS},
}
_LLAMA_NORMS = {
    "attention_norm.scale": "pre_self_attention_layer_norm.scale",
    "mlp_norm.scale": "post_self_attention_layer_norm.scale",
}
_GEMMA_NORMS = {
    "attention_norm.scale": "pre_self_attention_norm.scale",
    "attention_post_norm.scale": "post_self_attention_norm.scale",
    "mlp_norm.scale": "pre_ffw_norm.scale",
    "mlp_post_norm.scale": "post_ffw_norm.scale",
}


def _within(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {ours: f"{module}.{theirs}" for ours, theirs in names.items()}


def _attention(module: str, decoder_block: str = DEFAULT_FAMILY) -> dict[str, str]:
    """Returns the names of the parameters of a family's attention, which is `module` of a layer."""
    names = FAMILIES[decoder_block].attention.names_in_maxtext()
    return {f"attention.{ours}": f"{module}.{theirs}" for ours, theirs in names.items()}


def _mlp(ours: str, module: str) -> dict[str, str]:
    return {f"{ours}.{part}": f"{module}.{name}" for part, name in _MLP.items()}


def _layer(
    *,
    norms: Mapping[str, str],
    attention: str = "self_attention",
    mlp: str = "mlp",
    experts: str = "MoeBlock_0",
) -> dict[str, str]:
    """Returns the names of a layer's parameters, by ours, from the names of its modules."""
    return {
        **norms,
        **_attention(attention),
        **_mlp("mlp", mlp),
        **_within(experts, _EXPERTS),
    }


class MaxTextFamily(NamedTuple):
    """A family as MaxText stores it.

    Where our family's norms add one, MaxText's scales hold the one; where its embedding has a factor,
    MaxText's holds the factor, and logits are divided by it.
    """

    layer: Mapping[str, str]  # the names in a layer, by ours; `{}` stands for `local` or `global`
    cycle: int = 1  # layers that it scans together, each an array of its own
    dense: Mapping[str, str] | None = None  # the names in one of the first, dense layers
    scales_query: bool = False  # without `use_qk_norm` its query weights hold 1 / sqrt(head_dim)
    flattens_head_norms: bool = False  # the scales of its norms over all heads are vectors
    alternates: bool = False  # a scanned layer is a local and a global one of ours


_LLAMA = MaxTextFamily(_layer(norms=_LLAMA_NORMS), scales_query=True)
_DEEPSEEK_LAYER = {
    **_LLAMA_NORMS,
    **_attention("self_attention", "deepseek"),
    **_within("DeepSeekMoeBlock_0.MoeBlock_0", _EXPERTS),
    **_mlp("shared_experts", "DeepSeekMoeBlock_0.shared_experts"),
}
FAMILIES_OF_MAXTEXT: dict[str, MaxTextFamily] = {
    "llama2": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": MaxTextFamily(_layer(norms=_LLAMA_NORMS)),
    "qwen3": MaxTextFamily(_layer(norms=_LLAMA_NORMS)),
    "qwen3_moe": MaxTextFamily(_layer(norms=_LLAMA_NORMS, experts="moe_block")),
    "gemma": MaxTextFamily(
        _layer(norms={ours: _GEMMA_NORMS[ours] for ours in _LLAMA_NORMS}),
        scales_query=True,
    ),
    "gemma2": MaxTextFamily(
        _layer(
            norms={
                ours: name.replace(".scale", "_{}.scale") for ours, name in _GEMMA_NORMS.items()
            },
            attention="self_attention_{}",
            mlp="mlp_{}",
        ),
        scales_query=True,
        alternates=True,
    ),
    "gemma3": MaxTextFamily(_layer(norms=_GEMMA_NORMS), cycle=6),
    "gpt_oss": MaxTextFamily(
        _layer(norms=_LLAMA_NORMS, attention="GptOssAttention", experts="GptOssMlp"), cycle=2
    ),
    "olmo3": MaxTextFamily(
        _layer(
            norms={
                "attention_post_norm.scale": "post_self_attention_layer_norm.scale",
                "mlp_post_norm.scale": "post_mlp_layer_norm.scale",
            },
            attention="attention",
        ),
        cycle=4,
        flattens_head_norms=True,
    ),
    "deepseek": MaxTextFamily(
        _DEEPSEEK_LAYER,
        dense={
            **_LLAMA_NORMS,
            **_attention("self_attention", "deepseek"),
            **_mlp("mlp", "mlp"),
        },
    ),
}
_OUTSIDE = {
    "embedding": "token_embedder.embedding",
    "final_norm.scale": "decoder.decoder_norm.scale",
    "output": "decoder.logits_dense.kernel",
}


class Place(NamedTuple):
    """Where MaxText stores one of our parameters.

    Attributes:
      arrays: the name of the array of each layer of the stack, or the one name of a parameter
        outside of layers.
      numbers: where each layer is along the array's axis of layers; None for an array of one layer.
      factor: MaxText's values times the factor, plus the offset, are ours.
      offset: added after the factor.
      is_interleaved: whether neighbouring columns of a head are rotated together there, and its two
        halves here.
      is_flat: whether heads and their columns are one axis there.
    """

    arrays: tuple[str, ...]
    numbers: tuple[int | None, ...]
    factor: float = 1.0
    offset: float = 0.0
    is_interleaved: bool = False
    is_flat: bool = False

    @property
    def is_stacked(self) -> bool:
        return self.numbers != ()


def places_of(model: ModelConfig, available: Container[str]) -> dict[ParameterPath, Place]:
    """Returns the place of each parameter that a model of the family may have and the checkpoint
    holds.

    Args:
      available: the names of the checkpoint's parameters, from `decoder` or `token_embedder` on.

    Raises:
      ConfigError: MaxText has no such family, or we don't know its names.
    """
    family = FAMILIES_OF_MAXTEXT.get(model.decoder_block)
    if family is None:
        known = ", ".join(sorted(FAMILIES_OF_MAXTEXT))
        raise ConfigError(
            f"decoder_block={model.decoder_block}: MaxText's checkpoints are read for {known} only"
        )
    places: dict[ParameterPath, Place] = {}
    for row in possible_parameters(model):
        if place := _place(model, family, row, available):
            places[row.path] = place
    return places


def scanned_name(path: Sequence[str], decoder_block: str) -> str | None:
    """Returns MaxText's name of a parameter in scanned layers; None if there is none.

    Families whose names we don't know have those of llama's layers.

    Args:
      path: the parameter's path here.
    """
    family = FAMILIES_OF_MAXTEXT.get(decoder_block, _LLAMA)
    if path[0] not in (LAYERS, DENSE_LAYERS):
        return _OUTSIDE.get(".".join(path))
    place = next((int(name) for name in path[1:2] if name.isdigit()), 0)
    within = ".".join(name for name in path[1:] if not name.isdigit())
    is_dense = path[0] == DENSE_LAYERS
    name = ((family.dense if is_dense else family.layer) or {}).get(within)
    if name is None:
        return None
    stack = "layers" if family.dense is None else "dense_layers" if is_dense else "moe_layers"
    prefix = f"{stack}.layers_{place}" if family.cycle > 1 else stack
    whole = f"decoder.{prefix}.{name}"
    return whole.replace("{}", "global" if place % 2 else "local") if family.alternates else whole


def _place(
    model: ModelConfig, family: MaxTextFamily, row: Parameter, available: Container[str]
) -> Place | None:
    within = ".".join(row.path[len(row.layer) :])
    factor, offset = 1.0, 0.0
    if (
        family.scales_query
        and within in ("attention.query", "attention.query_bias")
        and not model.use_qk_norm
    ):
        # A product with the scale and a bias without it would not be the same scores.
        factor = math.sqrt(model.head_dim) * weight_factor(model, row.path)
    if FAMILIES[model.decoder_block].embedding.is_scaled and within == "embedding":
        factor = weight_factor(model, row.path) / math.sqrt(model.base_emb_dim)
    if norms_add_one(model) and within.endswith("norm.scale"):
        offset = -1.0
    is_flat = family.flattens_head_norms and within in (
        "attention.query_norm.scale",
        "attention.key_norm.scale",
    )
    if not row.is_stacked:
        outside = _OUTSIDE.get(within)
        if outside is None or outside not in available:
            return None
        return Place((outside,), (), factor, offset)

    names = family.dense if row.path[0] == DENSE_LAYERS else family.layer
    name = (names or {}).get(within)
    if name is None:
        return None
    step = 1 if row.path[0] == DENSE_LAYERS else cycle_length(model)
    first = first_layer(model, row.path[0]) + sum(map(int, row.layer[1:]))
    layers = range(first, first + step * num_stacked(model, row.path[0]), step)
    places = [_of_layer(model, family, layer, name, available) for layer in layers]
    if not places or None in places:
        return None
    arrays, numbers = zip(*filter(None, places), strict=True)
    is_rotated = within in ("attention.query", "attention.key") and model.rope_type == "llama3.1"
    return Place(arrays, numbers, factor, offset, is_rotated, is_flat)


def _of_layer(
    model: ModelConfig, family: MaxTextFamily, layer: int, name: str, available: Container[str]
) -> tuple[str, int | None] | None:
    """Returns the array that holds a parameter of a layer, and the layer's number in it; None if
    there is none.
    """
    for prefix, number in _prefixes(model, family, layer):
        whole = f"decoder.{prefix}.{name}"
        if family.alternates:
            whole = whole.replace("{}", "global" if layer % 2 else "local")
        if whole in available:
            return whole, number
    return None


def _prefixes(
    model: ModelConfig, family: MaxTextFamily, layer: int
) -> Iterator[tuple[str, int | None]]:
    """Yields where a layer may be: its prefix, and its number in scanned layers."""
    num_layers, num_dense = model.base_num_decoder_layers, model.first_num_dense_layers
    if family.dense is not None:
        stack, place = (
            ("dense_layers", layer) if layer < num_dense else ("moe_layers", layer - num_dense)
        )
        yield f"{stack}_{place}", None
        yield stack, place
        return
    if family.alternates:
        yield f"layers_{layer // 2}", None
        yield "layers", layer // 2
        return
    yield f"layers_{layer}", None
    if family.cycle > 1:
        whole = num_layers // family.cycle
        if layer < whole * family.cycle:
            yield f"layers.layers_{layer % family.cycle}", layer // family.cycle
        else:
            yield f"layers_remainder.layers_{layer % family.cycle}", None
    yield "layers", layer
