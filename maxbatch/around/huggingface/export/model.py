"""Models as Hugging Face folders: `config.json`, `generation_config.json`, safetensors and the
tokenizer's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from maxbatch.around.huggingface.arrays.tensors import TensorPlace, parameter_places, tensor_shapes
from maxbatch.around.huggingface.folder.config_json import (
    CONFIG_FILE,
    GENERATION_FILE,
    has_generation_file,
    is_huggingface_folder,
    read_config_json,
)
from maxbatch.around.huggingface.folder.model_fields import TOKEN_IDS, config_json
from maxbatch.config.hub import folder_of
from maxbatch.config.sections import DataConfig
from maxbatch.config.values import shown_path
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.families.family import FAMILIES, Json
from maxbatch.families.matrices import ROUTED_BIAS
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.hosts import warn
from maxbatch.parallel.trees import State
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.weights.checkpoint_reading import RemovedError, StoredCheckpoint
from maxbatch.run.weights.origin import Reader, Source
from maxbatch.run.weights.parameters import open_parameters, open_source, placed, this_host
from maxbatch.system.errors import ConfigError, writing
from maxbatch.system.storage.atomic_files import writing_folder
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.safetensors import DTYPES, INDEX, stored_tensors, write_tensors
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.update.state import abstract_model

# of dtypes in safetensors files
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_WRITTEN = re.compile(
    r"(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors|model\.safetensors\.index\.json|(generation_|adapter_)?config\.json"
)
_MOST_BYTES = 5_000_000_000  # of one file of tensors


def export_model(
    model: str, output: str, dtype: str | None, averaged: bool = False, base: str = ""
) -> str:
    """Writes a model as a Hugging Face folder, atomically; returns a summary to print.

    Args:
      model: a run folder, one of its checkpoints, or a Hugging Face folder.
      output: the folder to write, new or empty.
      dtype: of the tensors; None: that of the checkpoint or the folder, so that nothing is rounded.
      averaged: whether to write the average of the parameters that the run keeps.
      base: where the model that a run's adapters adapt is now; "": at the path that the run states.

    Raises:
      ConfigError: there is no such model, its family cannot express its keys, or the output is not
        empty.
    """
    target, source = new_folder(output), open_source(model, averaged, base)
    while True:
        try:
            return _written(source, model, target, output, dtype)
        except RemovedError:
            newer = source.newer() if isinstance(source, StoredCheckpoint) else None
            if newer is None:
                raise
            source = newer


def _written(source: Source, model: str, target: AnyPath, output: str, dtype: str | None) -> str:
    imported = is_huggingface_folder(model)
    # float32 holds every value of the other types that are read.
    overrides = ["weight_dtype=float32"] if imported else []
    config = source.config(overrides)
    if f"experts.{ROUTED_BIAS}" in FAMILIES[config.decoder_block].tensors:
        # one of zeros if the model has none
        config = source.config([*overrides, f"{ROUTED_BIAS}=true"])
    if config.model.capacity_factor > 0:
        warn(
            f"capacity_factor={config.capacity_factor:g} is no part of the export: Hugging Face's "
            "models drop nothing"
        )
    abstract = placed(abstract_model(config.decoder)[1], this_host())
    read = open_parameters(source, config.model, abstract)
    written_as = dtype or (_dtype_of_folder(model) if imported else config.weight_dtype)
    imported_from = _source(config.load_parameters_path)
    fields = config_json(
        config.decoder, written_as, imported_from or _token_ids(tokenizer_of(config.stream))
    )
    places = parameter_places(config.model, abstract)
    generation = _generation(config.load_parameters_path, fields)
    with writing(output), writing_folder(target, CONFIG_FILE, is_exported) as folder:
        num_files, num_bytes = _write_tensors(
            folder, places, _tensors(places, abstract, read, written_as), written_as
        )
        copy_tokenizer(config.data, folder)
        write_json(folder / GENERATION_FILE, generation)
        write_json(folder / CONFIG_FILE, fields)
    files = "1 file" if num_files == 1 else f"{num_files} files"
    return (
        f"{fields['model_type']}, {num_bytes / 1e6:,.1f} MB of {written_as} in {files}, in {output}"
    )


def new_folder(output: str) -> AnyPath:
    """Returns the path of a folder to write.

    Raises:
      ConfigError: it is neither new nor empty, nor the half that an export left when it was killed.
    """
    target = as_path(output)
    if not target.exists():
        return target
    names = [path.name for path in target.iterdir()] if target.is_dir() else [""]
    others = [name for name in names if not name.startswith(BUILDING)]
    is_half = len(others) < len(names) and all(map(is_exported, others))
    if others and not is_half:
        raise ConfigError(f"--output {shown_path(target)}: must be a new folder or an empty one")
    return target


def is_exported(name: str) -> bool:
    """Returns whether a file of this name is one that an export writes."""
    return bool(_WRITTEN.fullmatch(name)) or name in _TOKENIZER_FILES


def _dtype_of_folder(model: str) -> str:
    tensors = stored_tensors(folder_of(model, weights=True)).values()
    # biases may be float32 in any
    stored = next(tensor.dtype for tensor in tensors if len(tensor.shape) > 1)
    return next((name for name, theirs in DTYPE_NAMES.items() if theirs == stored), "float32")


def _source(path: str) -> Json:
    """Returns the fields of the folder that the parameters were imported from, if it still
    exists.
    """
    return read_config_json(path) if path and is_huggingface_folder(path) else {}


def _token_ids(tokenizer: Tokenizer) -> Json:
    return dict(zip(TOKEN_IDS, (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id), strict=True))


def _generation(path: str, fields: Json) -> Json:
    """Returns the `generation_config.json` of the folder that a model was imported from, else its
    token ids.
    """
    if path and has_generation_file(path):
        return read_config_json(path, GENERATION_FILE)
    return {name: fields.get(name) for name in TOKEN_IDS}


def _write_tensors(
    target: AnyPath,
    places: dict[tuple[str, ...], TensorPlace],
    tensors: Iterator[np.ndarray],
    dtype: str,
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
        one = len(files) == 1
        file = "model.safetensors" if one else f"model-{number:05}-of-{len(files):05}.safetensors"
        write_tensors(target / file, dtypes, {name: shapes[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file)
    total = sum(map(num_bytes, shapes))
    if len(files) > 1:
        write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(files), total


def _dtypes(places: dict[tuple[str, ...], TensorPlace], dtype: str) -> dict[str, str]:
    """Returns the types of the tensors, by name: float32 for a routers' bias, which a shorter type
    would round.
    """
    return {
        name: DTYPE_NAMES["float32" if place.layout.is_float32 else dtype]
        for place in places.values()
        for name in place.names
    }


def _groups(places: dict[tuple[str, ...], TensorPlace]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields the parameters that share tensors, each once."""
    for path, place in places.items():
        group = place.layout.joined or (path,)
        if path == group[0]:
            yield group


def _names_in_order(places: dict[tuple[str, ...], TensorPlace]) -> Iterator[str]:
    for group in _groups(places):
        yield from places[group[0]].names


def _tensors(
    places: dict[tuple[str, ...], TensorPlace], abstract: State, read: Reader, dtype: str
) -> Iterator[np.ndarray]:
    """Yields the tensors in the order of their names; parameters are read when their tensors are
    due.
    """
    all_of_them = dict(nnx.to_flat_state(abstract))
    for group in _groups(places):
        part = read(nnx.from_flat_state((path, all_of_them[path]) for path in group))
        found = {parameter_path(path): leaf for path, leaf in jax.tree.leaves_with_path(part)}
        here = [np.asarray(found[path]) for path in group]
        place = places[group[0]]
        for index in place.parts:
            of_part = [array[index] for array in here]
            parts = [
                places[path].layout.from_parameter(part)
                for path, part in zip(group, of_part, strict=True)
            ]
            joined = (
                parts[0]
                if len(parts) == 1
                else np.concatenate(parts, axis=place.layout.joined_axis)
            )
            if place.layout.alternates or place.layout.heads > 1:
                indices = np.concatenate([places[path].indices for path in group])
                joined = np.take(joined, np.argsort(indices), axis=place.layout.joined_axis)
            own = "float32" if place.layout.is_float32 else dtype
            yield np.ascontiguousarray(joined.astype(DTYPES[DTYPE_NAMES[own]]))


def copy_tokenizer(config: DataConfig, target: AnyPath) -> None:
    """Copies the files of a run's tokenizer, if it has any."""
    if not config.tokenizer_path:
        return
    path = folder_of(config.tokenizer_path)
    folder = path if path.is_dir() else path.parent
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            (target / name).write_bytes((folder / name).read_bytes())
    if config.tokenizer_type == "sentencepiece" and path.is_file():
        (target / "tokenizer.model").write_bytes(path.read_bytes())
