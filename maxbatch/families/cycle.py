"""The forms of a decoder's layers. Where they differ, the layers repeat a cycle of forms.

A place in the cycle is the number of a layer modulo the length of the cycle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from maxbatch.config.sections import ModelConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.attention import AttentionForm
from maxbatch.families.record import LOCAL, Family, is_local_layer


class LayerForm(NamedTuple):
    """The form of a layer, in what the layers of one model may differ."""

    attention: AttentionForm
    has_experts: bool  # in place of an MLP, or beside it
    # Whether it sees a part of its document only; None: as `attention_type` states for each layer.
    is_local: bool | None = None
    has_rope: bool = True  # in a model with RoPE


def possible_forms(family: Family) -> tuple[LayerForm, ...]:
    """Returns the forms that layers of a family may have."""
    if not family.has_cycle:
        return (LayerForm(family.attention, family.experts is not None),)
    if family.attention_before is not None:
        return tuple(
            LayerForm(attention, has_experts=True, is_local=False)
            for attention in (family.attention_before, family.attention)
        )
    windows = (True, False) if family.attention.has_global_heads else (False,)
    may_have = (False, True) if family.experts else (False,)
    return tuple(
        LayerForm(family.attention, has_experts, is_local)
        for has_experts in may_have
        for is_local in windows
    )


def cycle_length(model: ModelConfig) -> int:
    """Returns the layers of a cycle: the least common multiple of the periods that the keys state;
    1 for most families.

    It is computed without the cycle, which a config that is still to be refused may make very long.
    """
    if not FAMILIES[model.decoder_block].has_cycle:
        return 1
    if FAMILIES[model.decoder_block].attention_before is not None:
        return model.inhomogeneous_layer_cycle_interval
    windows, unrotated_step = (
        len(model.attention_type.split(",")),
        max(1, model.nope_layer_interval),
    )
    return math.lcm(windows, model.interleave_moe_layer_step, unrotated_step)


def cycle_of(model: ModelConfig) -> tuple[LayerForm, ...]:
    """Returns the form of each place in the cycle that the layers repeat; of most families it has
    one place.
    """
    family = FAMILIES[model.decoder_block]
    if not family.has_cycle:
        return possible_forms(family)
    if family.attention_before is not None:
        before, last = (
            LayerForm(attention, has_experts=True, is_local=False)
            for attention in (family.attention_before, family.attention)
        )
        return (before,) * (model.inhomogeneous_layer_cycle_interval - 1) + (last,)
    windows, experts_step = model.attention_type.split(","), model.interleave_moe_layer_step
    may_have = family.experts is not None and family.experts.are_in(model)
    unrotated_step = max(0, model.nope_layer_interval)

    def form(place: int) -> LayerForm:
        has_rope = unrotated_step == 0 or (place + 1) % unrotated_step > 0
        by_pattern = windows[place % len(windows)].strip() == LOCAL
        is_local = family.attention.is_local(model, has_rope, by_pattern)
        has_experts = may_have and (place + 1) % experts_step == 0
        return LayerForm(family.attention, has_experts, is_local, has_rope)

    return tuple(map(form, range(cycle_length(model))))


def places_of_keys(cycle: tuple[LayerForm, ...]) -> tuple[int, ...]:
    """Returns, for each place of a cycle, the last place with the same sight: local or global.

    Layers without keys of their own take the keys of that place, from the last cycle of layers that
    have keys.
    """
    last = {form.is_local: place for place, form in enumerate(cycle)}
    return tuple(last[form.is_local] for form in cycle)


def local_layers(model: ModelConfig, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer sees a window only."""
    cycle = cycle_of(model)
    of_attention_type = is_local_layer(model.attention_type, num_layers)
    forms = (cycle[layer % len(cycle)] for layer in range(num_layers))
    return tuple(
        by_attention_type if form.is_local is None else form.is_local
        for by_attention_type, form in zip(of_attention_type, forms, strict=True)
    )
