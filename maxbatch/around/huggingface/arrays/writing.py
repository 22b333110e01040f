"""A model as the files of a Hugging Face folder; parameters are read when their tensors are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx

from maxbatch.around.huggingface.arrays.tensors import TensorPlace, parameter_places, tensor_shapes
from maxbatch.around.huggingface.folder.config_json import CONFIG_FILE
from maxbatch.around.huggingface.folder.files import is_exported, model_files
from maxbatch.config.combined import DecoderConfig, StreamConfig
from maxbatch.families.parameter import ParameterPath
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import State
from maxbatch.run.folder.json_file import write_json
from maxbatch.system.storage.atomic_files import writing_folder
from maxbatch.system.storage.safetensors import DTYPE_NAMES, DTYPES, INDEX, write_tensors
from maxbatch.system.storage.storage import AnyPath

Places = dict[ParameterPath, TensorPlace]
_MOST_BYTES = 5_000_000_000  # of one file of tensors


def write_folder(
    target: AnyPath,
    config: DecoderConfig,
    stream: StreamConfig,
    abstract_params: State,
    read: Callable[[State], State],
    dtype: str,
) -> tuple[int, int]:
    """Writes a model's folder, atomically; returns the number and the bytes of its tensor files.

    Args:
      target: the folder to write, new or empty.
      config: the keys of the model.
      stream: the keys of its tokenizer, and of the folder that it was imported from.
      abstract_params: shapes and types of its parameters.
      read: reads some of these parameters.
      dtype: of the tensors, as `float32`.

    Raises:
      ConfigError: the model's family cannot express a key, or has no such parameter.
    """
    # Whatever a family refuses is refused before anything is written.
    files = model_files(config, stream, dtype)
    places = parameter_places(config, abstract_params)
    tensors = _tensors(places, abstract_params, read, dtype)
    with writing_folder(target, CONFIG_FILE, is_exported) as folder:
        sizes = _write_tensors(folder, places, tensors, dtype)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return sizes


def _write_tensors(
    folder: AnyPath, places: Places, tensors: Iterator[np.ndarray], dtype: str
) -> tuple[int, int]:
    """Writes the tensors in files of at most 5 GB; returns the files' number and bytes."""
    shapes, dtypes = tensor_shapes(places), _dtypes(places, dtype)

    def num_bytes(name: str) -> int:
        return math.prod(shapes[name]) * DTYPES[dtypes[name]].itemsize

    files: list[list[str]] = [[]]
    size = 0
    for name in _names_in_order(places):
        if files[-1] and size + num_bytes(name) > _MOST_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes(name)

    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            file = "model.safetensors"
        write_tensors(folder / file, dtypes, {name: shapes[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file)
    total = sum(map(num_bytes, shapes))
    if len(files) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(files), total


def _dtypes(places: Places, dtype: str) -> dict[str, str]:
    """Returns the types of the tensors, by name: float32 for a router's bias, which a shorter type
    would round.
    """
    return {
        name: DTYPE_NAMES["float32" if place.layout.is_float32 else dtype]
        for place in places.values()
        for name in place.names
    }


def _groups(places: Places) -> Iterator[tuple[ParameterPath, ...]]:
    """Yields the parameters that share tensors, each once."""
    for path, place in places.items():
        group = place.layout.joined or (path,)
        if path == group[0]:
            yield group


def _names_in_order(places: Places) -> Iterator[str]:
    for group in _groups(places):
        yield from places[group[0]].names


def _tensors(
    places: Places, abstract_params: State, read: Callable[[State], State], dtype: str
) -> Iterator[np.ndarray]:
    """Yields the tensors in the order of their names; parameters are read when their tensors are
    due.
    """
    abstract = dict(nnx.to_flat_state(abstract_params))
    for group in _groups(places):
        params = read(nnx.from_flat_state((path, abstract[path]) for path in group))
        arrays = {
            parameter_path(path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(params)
        }
        place = places[group[0]]
        layout = place.layout
        stored_as = DTYPES[DTYPE_NAMES["float32" if layout.is_float32 else dtype]]
        for index in place.parts:
            pieces = [places[path].layout.from_parameter(arrays[path][index]) for path in group]
            tensor = pieces[0]
            if len(pieces) > 1:
                tensor = np.concatenate(pieces, axis=layout.joined_axis)
            if layout.alternates or layout.heads > 1:
                # The pieces take turns along the axis, or follow each other head by head.
                indices = np.concatenate([places[path].indices for path in group])
                tensor = np.take(tensor, np.argsort(indices), axis=layout.joined_axis)
            yield np.ascontiguousarray(tensor.astype(stored_as))
