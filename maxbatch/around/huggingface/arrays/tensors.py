"""The tensors of Hugging Face's models: the place of each parameter in them, and the order of its
axes there.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from maxbatch.config.sections import ModelConfig
from maxbatch.families.cycle import cycle_length
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import (
    axis_sizes,
    first_layer,
    possible_parameters,
    shape_of,
    weight_factor,
    weight_offset,
)
from maxbatch.families.parameter import DENSE_LAYERS, Parameter, ParameterPath
from maxbatch.families.record import Family
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import State
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.safetensors import StoredTensor

# Tensors of files that are not parameters: tables and masks that follow from the config.
NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

Array = TypeVar("Array", np.ndarray, jax.Array)
Axes = tuple[tuple[int, ...], ...]


class TensorLayout(NamedTuple):
    """One parameter's place in a tensor; {layer} and {expert} in the name stand for the numbers of
    its parts.
    """

    name: str
    axes: Axes  # for each axis of the tensor the parameter's axes that it joins, the outer first
    # the parameters that the tensor holds one after another, if several
    joined: tuple[ParameterPath, ...] = ()
    joined_axis: int = 0  # the tensor's axis along which they follow each other
    has_experts: bool = False  # whether the tensor holds all experts
    alternates: bool = False  # whether its parameters take turns along the joined axis
    # number of heads that the tensor fuses: the rows of one head, of all parameters, come together
    heads: int = 1
    is_float32: bool = False  # whether it is float32 whatever the type of the others
    factor: float = 1.0  # of the parameter over the tensor
    offset: float = 0.0  # of the parameter from the tensor times the factor

    @property
    def is_scaled(self) -> bool:
        """Whether the parameter has other values than the tensor."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's part of the tensor, from the parameter's own (of one
        layer and expert).
        """
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def to_parameter(self, part: Array, shape: tuple[int, ...]) -> Array:
        """Returns a part of the tensor as a parameter of this shape; for NumPy a view, unless it
        is scaled.
        """
        order = [axis for group in self.axes for axis in group]
        parameter = part.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        return _times_plus(parameter, self.factor, self.offset) if self.is_scaled else parameter

    def from_parameter(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the parameter as its part of the tensor."""
        order = [axis for group in self.axes for axis in group]
        tensor = parameter.transpose(order).reshape(self.shape(parameter.shape))
        if not self.is_scaled:
            return tensor
        return _times_plus(tensor, 1 / self.factor, -self.offset / self.factor)


def _times_plus(array: Array, factor: float, offset: float) -> Array:
    """Returns an array in float32 times a factor, plus an offset: rounded once more only in a
    shorter type.
    """
    scaled: Array = array.astype(np.float32) * np.float32(factor)
    return scaled + np.float32(offset) if offset else scaled


def layouts_of(model: ModelConfig) -> dict[ParameterPath, TensorLayout]:
    """Returns the layouts of all parameters that the tensors of a model's family may hold."""
    family = FAMILIES[model.decoder_block]
    names = {row: name for row in possible_parameters(model) if (name := _tensor(family, row))}
    layouts: dict[ParameterPath, TensorLayout] = {}
    for row, name in names.items():
        inputs, outputs = (tuple(axis - row.per_expert for axis in group) for group in row.groups)
        is_reversed = row.is_map and not (family.inputs_first and row.is_stacked)
        axes: Axes = (
            (outputs, inputs) if is_reversed else (inputs, outputs) if inputs else (outputs,)
        )
        holds_experts = row.per_expert and "{expert}" not in name
        if holds_experts:
            inputs, outputs = row.groups
            axes = ((0,), inputs, outputs) if inputs else ((0,), outputs)
            axes = ((0,), outputs, inputs) if family.expert_outputs_first else axes
        if row.is_convolution:  # its channels have one input each, on an axis of its own
            outputs, width = outputs[:-1], outputs[-1:]
            axes = (outputs, (), width)
        together = tuple(
            other.path for other in names if names[other] == name and other.layer == row.layer
        )
        joined, along = (together, axes.index(outputs)) if together[1:] else ((), 0)
        alternates = holds_experts and bool(joined) and family.experts_alternate
        module = name.rpartition(".")[0]
        heads = next(
            (axis for ending, axis in family.by_head.items() if module.endswith(f".{ending}")), None
        )
        num_heads = axis_sizes(model)[heads] if heads and joined else 1
        layouts[row.path] = TensorLayout(
            name,
            axes,
            joined,
            along,
            holds_experts,
            alternates,
            num_heads,
            row.is_float32,
            weight_factor(model, row.path),
            weight_offset(model, row.path),
        )
    return layouts


def _tensor(family: Family, row: Parameter) -> str | None:
    """Returns the name of the tensor that holds a parameter; None if the family has none."""
    within = ".".join(row.path[len(row.layer) :])
    module = family.modules.get(re.sub(r"[._](scale|bias)$", "", within))
    before, after = (
        f"{family.layer}." if row.is_stacked else "",
        "bias" if row.name.endswith("bias") else "weight",
    )
    if whole := family.tensors.get(within):
        return before + whole
    return module and f"{before}{module}.{after}"


class TensorPlace(NamedTuple):
    """A parameter's part of a tensor, or of one tensor per layer, or per layer and expert."""

    layout: TensorLayout
    shape: tuple[int, ...]  # of the parameter, in one layer and of one expert
    # where its part begins along the layout's joined axis; of several heads, in the rows of each
    first: int
    stacked: tuple[int, ...]  # its leading axes, of layers and of experts, if it has them
    first_layer: int = 0  # the number of the first layer that has one
    layer_step: int = 1  # every layer_step-th layer has this tensor
    head_size: int = 0  # rows per head in a tensor that fuses several parameters

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The indices of its tensors along the leading axes, in order."""
        return list(np.ndindex(self.stacked))

    @property
    def names(self) -> list[str]:
        """The tensors' names, in the order of `parts`."""
        numbers = ((*(self.layers[layer] for layer in part[:1]), *part[1:]) for part in self.parts)
        return [
            self.layout.name.format(**dict(zip(("layer", "expert"), part, strict=False)))
            for part in numbers
        ]

    @property
    def layers(self) -> range:
        """The numbers of the layers that have one."""
        return range(
            self.first_layer, self.first_layer + self.layer_step * self.stacked[0], self.layer_step
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.layout.shape(self.shape)

    def rows(self, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        """Returns rows `first` to before `last` of its part of a tensor with two axes."""
        if self.layout.heads > 1:
            wanted = self.indices[first:last]
            rows: np.ndarray = tensor.rows(int(wanted[0]), int(wanted[-1]) + 1)[wanted - wanted[0]]
            return rows
        if self.layout.joined_axis == 0:
            return tensor.rows(self.first + first, self.first + last)
        return tensor.rows(first, last)[:, self._part(1)]

    @property
    def indices(self) -> np.ndarray:
        """The indices of its part of a tensor along the joined axis."""
        size, heads, turns = (
            self.part_shape[self.layout.joined_axis],
            self.layout.heads,
            len(self.layout.joined),
        )
        rows: np.ndarray = np.arange(size) * turns + self.first
        if not self.layout.alternates:
            of_heads: np.ndarray = (
                np.arange(heads)[:, None] * self.head_size + np.arange(size // heads)[None]
            )
            rows = self.first + of_heads.reshape(-1)
        return rows

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of a tensor, or of several heads a copy, as the parameter of one layer and
        expert.
        """
        axis = self.layout.joined_axis
        return self.layout.to_parameter(
            tensor[(slice(None),) * axis + (self._part(axis),)], self.shape
        )

    def _part(self, axis: int) -> slice | np.ndarray:
        """Returns its part of a tensor along the joined axis."""
        if self.layout.heads > 1:
            return self.indices
        if self.layout.alternates:
            return slice(self.first, None, len(self.layout.joined))
        return slice(self.first, self.first + self.part_shape[axis])


def parameter_places(model: ModelConfig, params: State) -> dict[ParameterPath, TensorPlace]:
    """Returns the place of each parameter, or of its abstract shape, in the tensors of its family.

    Raises:
      ConfigError: the family has no such parameter.
    """
    shapes = {parameter_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    layouts = layouts_of(model)
    rows = {row.path: row for row in possible_parameters(model)}

    def rows_of_head(path: ParameterPath) -> int:
        layout, row = layouts[path], rows[path]
        size = layout.shape(shape_of(row, model)[row.per_expert and not layout.has_experts :])[
            layout.joined_axis
        ]
        return size // layout.heads

    def place(path: ParameterPath) -> TensorPlace:
        if path not in layouts:
            name = ".".join(path)
            raise ConfigError(
                f"decoder_block={model.decoder_block}: Hugging Face's family has no parameter "
                f"like {name}"
            )
        layout, row = layouts[path], rows[path]
        stacked = shapes[path][: row.is_stacked]
        if row.per_expert:
            stacked = shapes[path][: 1 if layout.has_experts else 2]
        shape = shapes[path][len(stacked) :]
        before = layout.joined[: layout.joined.index(path)] if layout.joined else ()
        first = len(before)
        if not layout.alternates:
            first = sum(map(rows_of_head, before))
        if not row.is_stacked:
            return TensorPlace(layout, shape, first, stacked)
        step = 1 if path[0] == DENSE_LAYERS else cycle_length(model)
        number = first_layer(model, path[0]) + sum(map(int, row.layer[1:]))
        head_size = sum(map(rows_of_head, layout.joined)) if layout.heads > 1 else 0
        return TensorPlace(layout, shape, first, stacked, number, step, head_size)

    return {path: place(path) for path in shapes}


def tensor_shapes(places: dict[ParameterPath, TensorPlace]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor that parameters are made of."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places.values():
        shape, axis = list(place.part_shape), place.layout.joined_axis
        if place.layout.joined:
            shape[axis] = sum(places[path].part_shape[axis] for path in place.layout.joined)
        shapes |= dict.fromkeys(place.names, tuple(shape))
    return shapes
