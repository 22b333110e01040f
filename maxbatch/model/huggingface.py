"""The tensors of Hugging Face's models, by the parameters of a `Decoder`: their names, and the order of their axes.

Names and layouts are those of the transformers library (https://github.com/huggingface/transformers, `models/`).
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from maxbatch.config.families import FAMILIES, Family
from maxbatch.config.matrices import TABLES, Parameter, ParameterPath

Array = TypeVar("Array", np.ndarray, jax.Array)
Axes = tuple[tuple[int, ...], ...]


def parameter_path(path: Any) -> ParameterPath:
    """Returns the names that lead to a parameter, from its path in a tree of `jax.tree_util`."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


class Layout(NamedTuple):
    """One parameter's place in a tensor; {layer} in the name stands for the number of a stacked parameter's layer."""

    name: str
    axes: Axes  # for each axis of the tensor the parameter's axes that it joins, the outer first
    joined: tuple[ParameterPath, ...] = ()  # the parameters that the tensor holds one after another, if several
    joined_axis: int = 0  # the tensor's axis along which they follow each other

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's part of the tensor, from the parameter's own (of one layer)."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def to_parameter(self, part: Array, shape: tuple[int, ...]) -> Array:
        """Returns a part of the tensor as the parameter, whose shape it is given; of NumPy's a view."""
        order = [axis for group in self.axes for axis in group]
        return part.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def from_parameter(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the parameter as its part of the tensor."""
        order = [axis for group in self.axes for axis in group]
        return parameter.transpose(order).reshape(self.shape(parameter.shape))


Layouts = dict[ParameterPath, Layout]


def layouts_of(decoder_block: str) -> Layouts:
    """Returns the layouts of all parameters that the tensors of a family may hold."""
    family = FAMILIES[decoder_block]
    names = {row: name for row in TABLES[decoder_block] if (name := _tensor(family, row))}
    found: Layouts = {}
    for row, name in names.items():
        inputs, outputs = row.groups
        is_reversed = row.is_map and not (family.inputs_first and row.is_stacked)
        axes = (outputs, inputs) if is_reversed else (inputs, outputs) if inputs else (outputs,)
        together = tuple(other.path for other in names if names[other] == name)
        found[row.path] = Layout(name, axes, together, axes.index(outputs)) if together[1:] else Layout(name, axes)
    return found


def _tensor(family: Family, row: Parameter) -> str | None:
    """Returns the name of the tensor that holds a parameter; None if the family has none."""
    module = family.modules.get(re.sub(r"[._](scale|bias)$", "", row.name))
    return module and f"{module}.{'bias' if row.name.endswith('bias') else 'weight'}"


# What files hold besides parameters: tables and masks that follow from the config.
NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
TIED_OUTPUT = "lm_head.weight"
