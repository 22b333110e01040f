"""Parameters from a Hugging Face folder, shard by shard onto their devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
_LINE = 64  # bytes of memory that a processor reads and writes at once


def parameter_reader(
    path: str | Path, config: ConfigDict, abstract_params: nnx.State
) -> Callable[[nnx.State], nnx.State]:
    """Returns a function that reads parameters of a Hugging Face folder: those of `abstract_params`, or some of them.

    It is given their shapes, types and places. A host cuts the parts of its devices from memory maps of the files, one
    tensor at a time, each once, and turns them into the parameter's order of axes. The largest parameters come first,
    while there is most room.

    Raises:
      ConfigError: tensors are missing, unexpected, of another shape than the config says, or of another type.
    """
    folder = as_path(path)
    stored = stored_tensors(folder)
    if config.decoder_block == "gpt2" and not any(name.startswith(PREFIX) for name in stored):
        stored = {PREFIX + name: tensor for name, tensor in stored.items()}
    places = parameter_places(config.decoder_block, abstract_params)
    _check_tensors(folder, stored, tensor_shapes(places), bool(config.logits_via_embedding))

    def read(abstract_params: nnx.State) -> nnx.State:
        leaves = jax.tree.leaves_with_path(abstract_params)
        found: dict[int, jax.Array] = {}
        for number in sorted(range(len(leaves)), key=lambda number: -math.prod(leaves[number][1].shape)):
            place, abstract = leaves[number]
            found[number] = _read(stored, places[parameter_path(place)], abstract)
        return jax.tree.unflatten(jax.tree.structure(abstract_params), [found[i] for i in range(len(leaves))])

    return read


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


Cut = tuple[tuple[int, int], ...]  # begin and end along each axis of a parameter


def _read(stored: dict[str, StoredTensor], place: Place, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns one parameter, of which each device is given its own part."""
    assert abstract.sharding is not None
    cuts: dict[jax.Device, Cut] = {}
    for device, index in abstract.sharding.addressable_devices_indices_map(abstract.shape).items():
        edges = (cut.indices(size)[:2] for cut, size in zip(index or (), abstract.shape, strict=True))
        cuts[device] = tuple(edges)
    parts = _parts(stored, place, set(cuts.values()), np.dtype(abstract.dtype))
    arrays = [jax.device_put(parts[cut], device) for device, cut in cuts.items()]
    array = jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, arrays, dtype=abstract.dtype)
    return array.block_until_ready()  # of accelerators; the parts are then no longer needed


def _parts(stored: dict[str, StoredTensor], place: Place, cuts: set[Cut], dtype: np.dtype) -> dict[Cut, np.ndarray]:
    """Returns parts of a parameter; each of its tensors is read once."""
    parts = {cut: _aligned([end - begin for begin, end in cut], dtype) for cut in cuts}
    with ThreadPoolExecutor() as threads:
        for layer, name in enumerate(place.names):
            rows = {cut: _row_of_layer(cut, part, layer, place) for cut, part in parts.items()}
            wanted = {cut: row for cut, row in rows.items() if row is not None}
            if not wanted:
                continue
            tensor = place.cut(stored[name].array())
            inside = (tuple(slice(*edges) for edges in cut[len(cut) - row.ndim :]) for cut, row in wanted.items())
            list(threads.map(_copy, [tensor[cut] for cut in inside], wanted.values()))
    return parts


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of undefined values that a CPU device takes as its own memory instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies by lines of memory of the target: a transposition that goes along either array misses the cache."""
    if source.dtype == target.dtype:
        source, target = (array.view(f"u{array.itemsize}") for array in (source, target))
    step = _LINE // target.itemsize
    whole = source.strides[-1] == source.itemsize
    for first in range(0, target.shape[-1], target.shape[-1] if whole else step):
        last = slice(first, None if whole else first + step)
        target[..., last] = source[..., last]


def _row_of_layer(cut: Cut, part: np.ndarray, layer: int, place: Place) -> np.ndarray | None:
    """Returns a view of a layer in a part of the parameter, None if it is not in it."""
    if place.num_layers is None:
        return part
    begin, end = cut[0]
    return part[layer - begin] if begin <= layer < end else None


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
