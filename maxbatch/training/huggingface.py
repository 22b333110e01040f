"""Parameters from a Hugging Face folder, shard by shard onto their devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.model.huggingface import LAYOUTS, NOT_PARAMETERS, TIED_OUTPUT, Layout, ParameterPath
from maxbatch.system.errors import ConfigError
from maxbatch.system.safetensors import DTYPES, StoredTensor, stored_tensors

_MOST_NAMES = 3  # of tensors in a message


def read_parameters(path: str | Path, config: ConfigDict, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a Hugging Face folder in `weight_dtype`, placed as `abstract_params` says.

    Each device's part is cut from memory maps of the files, so a host reads what its devices hold, one parameter's part
    at a time.

    Raises:
      ConfigError: tensors are missing, unexpected, of another shape than the config says, or of another type.
    """
    folder = Path(path).expanduser().absolute()
    stored = stored_tensors(folder)
    layouts = LAYOUTS["llama2"]
    parameters = jax.tree.leaves_with_path(abstract_params)
    expected = dict(_expected(parameters, layouts))
    _check_tensors(folder, stored, expected, bool(config.logits_via_embedding))

    def placed(path: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        names = parameter_path(path)
        source = _Source(stored, layouts[names], abstract, is_stacked=names[0] == "layers")
        assert abstract.sharding is not None
        return jax.make_array_from_callback(abstract.shape, abstract.sharding, source.part)

    return jax.tree.map_with_path(placed, abstract_params)


def parameter_path(path: Any) -> ParameterPath:
    """Returns the names that lead to a parameter."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


class _Source:
    """The tensors of one parameter, stacked or not."""

    def __init__(self, stored: dict[str, StoredTensor], layout: Layout, abstract: Any, is_stacked: bool) -> None:
        self._stored, self._layout, self._is_stacked = stored, layout, is_stacked
        self._shape, self._dtype = abstract.shape, abstract.dtype

    def part(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Returns a part of the parameter, whose axes `index` cuts."""
        assert index is not None
        if not self._is_stacked:
            return self._layer(0, self._shape, index).astype(self._dtype)
        layers = range(*index[0].indices(self._shape[0]))
        inside = [len(range(*cut.indices(size))) for cut, size in zip(index[1:], self._shape[1:], strict=True)]
        part = np.empty((len(layers), *inside), self._dtype)
        for row, layer in zip(part, layers, strict=True):
            row[...] = self._layer(layer, self._shape[1:], index[1:])
        return part

    def _layer(self, layer: int, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        tensor = self._stored[self._layout.name.format(layer=layer)].array()
        return self._layout.to_parameter(tensor, shape)[index]


def _expected(parameters: Any, layouts: dict[ParameterPath, Layout]) -> Any:
    """Yields the name and shape of each tensor that the parameters are made of."""
    for path, abstract in parameters:
        names = parameter_path(path)
        layout, stacked = layouts[names], names[0] == "layers"
        shape = layout.shape(abstract.shape[1:] if stacked else abstract.shape)
        for layer in range(abstract.shape[0] if stacked else 1):
            yield layout.name.format(layer=layer), shape


def _check_tensors(
    folder: Path, stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]], is_tied: bool
) -> None:
    if missing := [name for name in expected if name not in stored]:
        raise ConfigError(f"{folder}: lacks {_some(missing)}")
    known = [name for name in stored if name.endswith(NOT_PARAMETERS) or (is_tied and name == TIED_OUTPUT)]
    if unexpected := sorted(stored.keys() - expected.keys() - set(known)):
        raise ConfigError(f"{folder}: holds {_some(unexpected)}, which a model of these keys does not have")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            theirs, ours = (list(shape) for shape in (stored[name].shape, shape))
            raise ConfigError(f"{folder}: {name} has the shape {theirs}, and the model keys make it {ours}")
        if stored[name].dtype not in DTYPES:
            raise ConfigError(f"{folder}: {name} is {stored[name].dtype}; must be one of {', '.join(DTYPES)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
