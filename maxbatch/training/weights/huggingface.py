"""The place of parameters in the tensors of a Hugging Face folder."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from maxbatch.model.huggingface import Layout, ParameterPath, layouts_of, parameter_path
from maxbatch.system.errors import ConfigError
from maxbatch.system.safetensors import StoredTensor


class Place(NamedTuple):
    """A parameter's part of a tensor, or of one tensor per layer."""

    layout: Layout
    shape: tuple[int, ...]  # of the parameter, in one layer
    first: int  # where its part begins along the layout's joined axis
    num_layers: int | None  # None: it is not stacked

    @property
    def names(self) -> list[str]:
        """The tensors' names, in order of their layers."""
        return [self.layout.name.format(layer=layer) for layer in range(self.num_layers or 1)]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of its part of a tensor."""
        return self.layout.shape(self.shape)

    def rows(self, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        """Returns rows `first` to before `last` of its part of a tensor with two axes."""
        if self.layout.joined_axis == 0:
            return tensor.rows(self.first + first, self.first + last)
        return tensor.rows(first, last)[:, self.first : self.first + self.part_shape[1]]

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of a tensor as the parameter of one layer."""
        axis = self.layout.joined_axis
        part = (slice(None),) * axis + (slice(self.first, self.first + self.part_shape[axis]),)
        return self.layout.to_parameter(tensor[part], self.shape)


def parameter_places(decoder_block: str, params: nnx.State) -> dict[ParameterPath, Place]:
    """Returns the place of each parameter, or of its abstract shape, in the tensors of its family.

    Raises:
      ConfigError: the family has no such parameter.
    """
    shapes = {parameter_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    layouts = layouts_of(decoder_block)

    def place(path: ParameterPath) -> Place:
        if path not in layouts:
            name = ".".join(path)
            raise ConfigError(f"decoder_block={decoder_block}: Hugging Face's family has no parameter like {name}")
        layout, is_stacked = layouts[path], path[0] == "layers"
        shape = shapes[path][1:] if is_stacked else shapes[path]
        before = layout.joined[: layout.joined.index(path)] if layout.joined else ()
        first = sum(place(other).part_shape[layout.joined_axis] for other in before)
        return Place(layout, shape, first, shapes[path][0] if is_stacked else None)

    return {path: place(path) for path in shapes}


def tensor_shapes(places: dict[ParameterPath, Place]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor that parameters are made of."""
    found: dict[str, tuple[int, ...]] = {}
    for place in places.values():
        shape, axis = list(place.part_shape), place.layout.joined_axis
        if place.layout.joined:
            shape[axis] = sum(places[path].part_shape[axis] for path in place.layout.joined)
        found |= dict.fromkeys(place.names, tuple(shape))
    return found
