"""Parameters from a Hugging Face folder, shard by shard onto their devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.config.values import shown, shown_path
from maxbatch.model.huggingface import LAYOUTS, NOT_PARAMETERS, PREFIX, TIED_OUTPUT, Layout, ParameterPath
from maxbatch.system.errors import ConfigError
from maxbatch.system.safetensors import DTYPES, StoredTensor, stored_tensors
from maxbatch.system.storage import AnyPath, as_path

_MOST_NAMES = 3  # of tensors in a message


def read_parameters(path: str | Path, config: ConfigDict, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a Hugging Face folder in `weight_dtype`, placed as `abstract_params` says.

    Each device's part is cut from memory maps of the files, so a host reads what its devices hold, one parameter's part
    at a time.

    Raises:
      ConfigError: tensors are missing, unexpected, of another shape than the config says, or of another type.
    """
    folder = as_path(path)
    stored = stored_tensors(folder)
    if config.decoder_block == "gpt2" and not any(name.startswith(PREFIX) for name in stored):
        stored = {PREFIX + name: tensor for name, tensor in stored.items()}
    places = parameter_places(config.decoder_block, abstract_params)
    _check_tensors(folder, stored, tensor_shapes(places), bool(config.logits_via_embedding))

    def placed(path: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        source = _Source(stored, places[parameter_path(path)], abstract.dtype)
        assert abstract.sharding is not None
        return jax.make_array_from_callback(abstract.shape, abstract.sharding, source.part)

    return jax.tree.map_with_path(placed, abstract_params)


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

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of a tensor as the parameter of one layer."""
        axis = self.layout.joined_axis
        part = (slice(None),) * axis + (slice(self.first, self.first + self.part_shape[axis]),)
        return self.layout.to_parameter(tensor[part], self.shape)


def parameter_path(path: Any) -> ParameterPath:
    """Returns the names that lead to a parameter."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


def parameter_places(decoder_block: str, params: nnx.State) -> dict[ParameterPath, Place]:
    """Returns the place of each parameter, or of its abstract shape, in the tensors of its family.

    Raises:
      ConfigError: the family has no such parameter.
    """
    shapes = {parameter_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    layouts = LAYOUTS[decoder_block]

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


class _Source:
    """The tensors of one parameter, stacked or not."""

    def __init__(self, stored: dict[str, StoredTensor], place: Place, dtype: Any) -> None:
        self._stored, self._place, self._dtype = stored, place, dtype

    def part(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Returns a part of the parameter, whose axes `index` cuts."""
        assert index is not None
        num_layers, shape = self._place.num_layers, self._place.shape
        if num_layers is None:
            return self._of_layer(0, index).astype(self._dtype)
        layers = range(*index[0].indices(num_layers))
        inside = [len(range(*cut.indices(size))) for cut, size in zip(index[1:], shape, strict=True)]
        part = np.empty((len(layers), *inside), self._dtype)
        for row, layer in enumerate(layers):
            part[row] = self._of_layer(layer, index[1:])
        return part

    def _of_layer(self, layer: int, index: tuple[slice, ...]) -> np.ndarray:
        return self._place.cut(self._stored[self._place.names[layer]].array())[index]


def _check_tensors(
    folder: AnyPath, stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]], is_tied: bool
) -> None:
    if missing := [name for name in expected if name not in stored]:
        raise ConfigError(f"{shown_path(folder)}: lacks {_some(missing)}, which a model of these keys has")
    known = {name for name in stored if name.endswith(NOT_PARAMETERS) or (is_tied and name == TIED_OUTPUT)}
    if unexpected := sorted(stored.keys() - expected.keys() - known):
        raise ConfigError(f"{shown_path(folder)}: holds {_some(unexpected)}, which a model of these keys does not have")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            theirs, ours = (list(shape) for shape in (stored[name].shape, shape))
            raise ConfigError(f"{shown_path(folder)}: {name} has the shape {theirs}; the model keys make it {ours}")
        if stored[name].dtype not in DTYPES:
            dtype, works = shown(stored[name].dtype), ", ".join(DTYPES)
            raise ConfigError(f"{shown_path(folder)}: {name} has the type {dtype}; must be one of {works}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(map(shown, names[:_MOST_NAMES]))}{more}"
