"""The forms of a decoder's layers. Where they differ, the layers repeat a cycle of forms.

A place in the cycle is the number of a layer modulo the length of the cycle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from maxbatch.config.sections import ModelConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.attention import AttentionForm, is_local_layer
from maxbatch.families.record import Family


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
    may_have_experts: tuple[bool, ...] = (family.experts is not None,)
    if family.experts is not None and family.experts.are_in_some:
        may_have_experts = (False, True)
    return tuple(
        LayerForm(attention, has_experts, is_local)
        for attention in reversed(family.attention_forms)
        for has_experts in may_have_experts
        for is_local in ((True, False) if attention.has_global_heads else (False,))
    )


def cycle_length(model: ModelConfig) -> int:
    """Returns the layers of a cycle: the least common multiple of the periods that the keys state;
    1 for most families.

    It is computed without the cycle, which a config that is still to be refused may make very long.
    """
    family = FAMILIES[model.decoder_block]
    if not family.has_cycle:
        return 1
    steps = (max(1, model[name]) for form in family.forms for name in form.steps)
    return math.lcm(len(model.attention_type.split(",")), *steps)


def cycle_of(model: ModelConfig) -> tuple[LayerForm, ...]:
    """Returns the form of each place in the cycle that the layers repeat; of most families it has
    one place.
    """
    family = FAMILIES[model.decoder_block]
    if not family.has_cycle:
        return possible_forms(family)
    length = cycle_length(model)
    windows = is_local_layer(model.attention_type, length)
    return tuple(_form_at(model, place, windows[place]) for place in range(length))


def _form_at(model: ModelConfig, place: int, by_pattern: bool) -> LayerForm:
    """Returns the form of a place; `by_pattern` is whether `attention_type` makes it local."""
    family = FAMILIES[model.decoder_block]
    attention, before = family.attention, family.attention_before
    if before is not None and before.is_at(model, place):
        attention = before
    has_experts = family.experts is not None and family.experts.are_at(model, place)
    has_rope = attention.rotates(model, place)
    is_local = attention.is_local(model, has_rope, by_pattern)
    return LayerForm(attention, has_experts, is_local, has_rope)


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
