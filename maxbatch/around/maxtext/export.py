"""Models as checkpoints that MaxText loads (`load_parameters_path=DIR/0/items`), with its layers
scanned.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.around.huggingface.export.model import new_folder
from maxbatch.around.maxtext.checkpoints.names import LAYER_AXIS, Place, places_of
from maxbatch.config.values import shown_path
from maxbatch.families.parameter import ParameterPath
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import State
from maxbatch.run.weights.parameters import OpenedModel, read_model
from maxbatch.system.errors import ConfigError, writing
from maxbatch.system.storage.atomic_files import writing_folder
from maxbatch.system.storage.storage import is_remote

_UNSCANNED = re.compile(r"decoder\.(dense_|moe_)?layers_\d+\.")
_STEP = "0"


class ScannedNames:
    """The names of a checkpoint whose layers are scanned."""

    def __contains__(self, name: object) -> bool:
        return not _UNSCANNED.match(str(name))


def export_maxtext(
    model: str, output: str, dtype: str | None, averaged: bool = False, base: str = ""
) -> str:
    """Writes a model's parameters as a MaxText checkpoint, atomically; returns a summary to print.

    Args:
      model: a run folder, one of its checkpoints, a Hugging Face folder, or a MaxText checkpoint.
      output: the folder to write, new or empty, on a disk.
      dtype: of the parameters; None: that of the model, so that nothing is rounded.
      averaged: whether to write the average of the parameters that the run keeps.
      base: where the base model of a run's adapters is now.

    Raises:
      ConfigError: there is no such model, MaxText has no such family, the output is not empty, or
        Orbax is missing.
    """
    target = new_folder(output)
    if is_remote(target):
        raise ConfigError(
            f"--output {shown_path(target)}: MaxText's form is written to a disk; write it there, "
            "and copy the folder"
        )
    assert isinstance(target, Path)

    def write(opened: OpenedModel) -> str:
        config, params = opened.config, opened.read(opened.abstract)
        arrays = arrays_there(params, places_of(config.model, ScannedNames()), dtype)
        with writing(output), writing_folder(target, last=_STEP) as folder:
            _save(Path(str(folder)).absolute() / _STEP, nested(arrays))
        num_bytes = sum(array.nbytes for array in arrays.values())
        written = dtype or config.weight_dtype
        return (
            f"{config.decoder_block}, {num_bytes / 1e6:,.1f} MB of {written}, in {output}; "
            f"MaxText reads it by load_parameters_path={output}/{_STEP}/items"
        )

    return read_model(model, write, averaged, base)


def arrays_there(
    params: State, places: Mapping[ParameterPath, Place], dtype: str | None
) -> dict[str, np.ndarray]:
    """Returns MaxText's arrays by name.

    Raises:
      ConfigError: MaxText has no array for a parameter.
    """
    layers: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    arrays: dict[str, np.ndarray] = {}
    for keys, value in jax.tree.leaves_with_path(params):
        path = parameter_path(keys)
        place = places.get(path)
        if place is None:
            raise ConfigError(
                f"{'.'.join(path)}: MaxText's form of this family has no such parameter"
            )
        here = _as_theirs(np.asarray(value), place, dtype)
        if not place.is_stacked:
            arrays[place.arrays[0]] = here
            continue
        for layer, (name, number) in enumerate(zip(place.arrays, place.numbers, strict=True)):
            if number is None:
                arrays[name] = here[layer]
            else:
                layers[name][number] = here[layer]
    for name, of_layers in layers.items():
        arrays[name] = np.stack(
            [of_layers[number] for number in sorted(of_layers)], axis=LAYER_AXIS
        )
    return arrays


def _as_theirs(value: np.ndarray, place: Place, dtype: str | None) -> np.ndarray:
    """Returns our values as MaxText's."""
    written: Any = jnp.dtype(dtype) if dtype else value.dtype
    if (place.factor, place.offset) != (1.0, 0.0):
        value = (value.astype(np.float32) - np.float32(place.offset)) / np.float32(place.factor)
    if place.is_interleaved:  # the two halves of a head become neighbouring columns
        halves = np.split(value, 2, axis=-1)
        value = np.stack(halves, axis=-1).reshape(value.shape)
    if place.is_flat:
        value = value.reshape(len(value), -1) if place.is_stacked else value.reshape(-1)
    whole: np.ndarray = value.astype(written)
    return whole


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


def _save(folder: Path, params: dict[str, Any]) -> None:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ConfigError(
            "MaxText's form is written by Orbax, which is not installed; works: pip install "
            "'maxbatch[maxtext]'"
        ) from None
    tree = {"params": {"params": params}}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
