"""A MaxText checkpoint as a source of parameters and of optimizer states, sharded onto their
devices.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.around.maxtext.checkpoints.exchange import read_parameter, round_bytes
from maxbatch.around.maxtext.checkpoints.folder import METADATA, ItemsFolder, open_items
from maxbatch.around.maxtext.checkpoints.names import LAYER_AXIS, Place, places_of
from maxbatch.around.maxtext.checkpoints.stored import StoredArray, open_arrays
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.sections import ModelConfig
from maxbatch.config.values import first_of
from maxbatch.families.forms.experts import ROUTED_BIAS
from maxbatch.families.parameter import ParameterPath
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.sharding import zeros_of
from maxbatch.parallel.trees import KeyPath, State, TreeOf
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.bounded import read_bytes
from maxbatch.system.storage.storage import AnyPath, file_sizes

_PARAMETERS = "params.params."  # prefix of the parameters' names
# Adam's, in MaxText's first optimizer state: by what power of a parameter's factor they are multiplied
_MOMENTS = {"mu": -1, "nu": -2}
_MOST_NAMES = 3  # of arrays in a message
_MOST_BYTES = 256 << 20  # of a file that describes arrays


class MaxTextCheckpoint(ForeignState):
    """A checkpoint of MaxText: a state, or parameters alone.

    Args:
      path: a run of MaxText, for its newest checkpoint, or one of its checkpoints.
      key: the config key that states the path, for messages.

    Raises:
      ConfigError: there is no whole checkpoint.
    """

    def __init__(self, path: str | Path, key: str = "load_parameters_path") -> None:
        self._path = str(path)
        self._folder: ItemsFolder = open_items(self._path, key)

    def __str__(self) -> str:
        return str(self._folder.path)

    @property
    def stated(self) -> str:
        """The key and the path that name it, for messages."""
        return self._folder.stated

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config that "key=value" texts state; the checkpoint itself states none of the
        model's keys.
        """
        return load_config(overrides=[f"load_parameters_path={self._path}", *overrides])

    @property
    def identity(self) -> str:
        """A hash of the checkpoint's description and of the names and sizes of its data files.

        MaxText gives every data file a random name when it writes it, so other content has other
        names.
        """
        described = hashlib.blake2b(digest_size=16)
        for folder in self._data_folders():
            for name, size in sorted(file_sizes(folder).items()):
                described.update(json.dumps([folder.name, name, size]).encode())
        for name in (METADATA, "manifest.ocdbt"):
            file = self._folder.path / name
            if file.is_file():
                described.update(read_bytes(file, str(file), _MOST_BYTES))
        return described.hexdigest()

    def identity_like(self, other: str) -> str:
        """Returns the identity; these checkpoints have only one form."""
        return self.identity

    def _data_folders(self) -> list[AnyPath]:
        items = self._folder.path
        return [folder for folder in (items, items / "d") if folder.is_dir()]

    @property
    def stored_dtype(self) -> None:
        """None: its parameters are read in the config's type."""

    @property
    def step(self) -> int | None:
        """The number of its folder; None without one. A folder 4 holds five updates (`updates`)."""
        return self._folder.folder_step

    def adapting(self) -> None:
        """Returns None: it holds a whole model."""

    @property
    def has_state(self) -> bool:
        """Whether it holds an optimizer's state."""
        return "step" in self._folder.names and any(
            name.startswith("opt_state.") for name in self._folder.names
        )

    @property
    def updates(self) -> int:
        """The updates that its state holds.

        Raises:
          ConfigError: it holds parameters alone, or is damaged.
        """
        self._require_state()
        count = int(self._scalar("step"))
        if count < 0:
            raise ConfigError(f"{self.stated}: its step is {count}; the checkpoint is damaged")
        return count

    def open(self, config: ModelConfig, abstract_params: State) -> Callable[[State], State]:
        """Returns a function that reads its parameters: those of `abstract_params`, or some of
        them.

        Routers start without a bias if the checkpoint has none.

        Raises:
          ConfigError: arrays are missing, unexpected, or of another shape than the config's.
        """
        reader_of = self._readers(config, abstract_params, _PARAMETERS)

        def read(part: State) -> State:
            wanted = [
                (abstract, reader_of(parameter_path(keys)))
                for keys, abstract in jax.tree.leaves_with_path(part)
            ]
            whole: State = jax.tree.unflatten(jax.tree.structure(part), _read_all(wanted))
            return whole

        return read

    def read_state(
        self, config: ModelConfig, abstract_params: State, abstract_opt_state: TreeOf
    ) -> tuple[State, TreeOf]:
        """Reads parameters and optimizer state onto the shardings of abstract ones.

        Moments of a parameter that we store multiplied by a factor are those of a gradient divided
        by it.

        Raises:
          ConfigError: there is no state, or it is of another model or optimizer.
        """
        self._require_state()
        of_params = self._readers(config, abstract_params, _PARAMETERS)
        moments = {
            name: self._readers(
                config, abstract_params, f"{self._first_of_optimizer(name)}.params.", power
            )
            for name, power in _MOMENTS.items()
        }

        def reader_of(keys: KeyPath) -> _Reader | None:
            field, path = _field_of(keys), parameter_path(keys)
            if field in _MOMENTS and path:
                return moments[field](path)
            # MaxText keeps no counts of experts
            if field == "last_counts_NxE" or _counts_updates(keys):
                return None
            raise self._other_optimizer(f"ours has {'.'.join([field, *path])}")

        params = jax.tree.leaves_with_path(abstract_params)
        opt_state = jax.tree.leaves_with_path(abstract_opt_state)
        arrays = _read_all(
            [
                *((abstract, of_params(parameter_path(keys))) for keys, abstract in params),
                *((abstract, reader_of(keys)) for keys, abstract in opt_state),
            ]
        )
        for number, (keys, abstract) in enumerate(opt_state, len(params)):
            if _counts_updates(keys):
                count = self._scalar(self._first_of_optimizer("count"))
                arrays[number] = jax.device_put(
                    jnp.asarray(count, abstract.dtype), abstract.sharding
                )
        return (
            jax.tree.unflatten(jax.tree.structure(abstract_params), arrays[: len(params)]),
            jax.tree.unflatten(jax.tree.structure(abstract_opt_state), arrays[len(params) :]),
        )

    def _require_state(self) -> None:
        if not self.has_state:
            raise ConfigError(
                f"{self.stated}: holds parameters alone, no optimizer state; works: "
                f"load_parameters_path={self._path}"
            )

    def _other_optimizer(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.stated}: is of another optimizer ({why}); load_parameters_path takes the "
            "parameters alone"
        )

    def _first_of_optimizer(self, field: str) -> str:
        """Returns the prefix or the name of a field of Adam's state, wherever MaxText's chain has
        it.
        """
        for chain in ("opt_state.0.", "opt_state.1.", "opt_state."):
            name = f"{chain}{field}"
            if any(array == name or array.startswith(f"{name}.") for array in self._folder.names):
                return name
        raise self._other_optimizer(f"MaxText's has no {field}")

    def _scalar(self, name: str) -> np.ndarray:
        return open_arrays(self._folder, [name])[name].read(())

    def _readers(
        self, config: ModelConfig, abstract_params: State, prefix: str, power: int = 1
    ) -> Callable[[ParameterPath], _Reader | None]:
        """Returns a function of a parameter's path; it returns None for an array that the
        checkpoint does not have.

        Args:
          prefix: of the arrays, which are parameters or moments.
          power: of the factor that multiplies parameters; 1 for parameters themselves.
        """
        places, arrays = self._checked(config, abstract_params, prefix)

        def reader(path: ParameterPath) -> _Reader | None:
            if path not in places:
                return None
            place = places[path]
            offset = place.offset if power == 1 else 0.0
            return _Reader(arrays, place, (place.factor**power, offset))

        return reader

    def _checked(
        self, config: ModelConfig, abstract_params: State, prefix: str
    ) -> tuple[dict[ParameterPath, Place], dict[str, StoredArray]]:
        """Returns the places of all parameters and the arrays there, opened, whose shapes fit.

        Raises:
          ConfigError: arrays are missing, unexpected, or of another shape.
        """
        available = {
            name.removeprefix(prefix) for name in self._folder.names if name.startswith(prefix)
        }
        if not available:
            raise ConfigError(
                f"{self.stated}: has no arrays {prefix}*; it is not a checkpoint of MaxText's "
                "training"
            )
        places = places_of(config, available)
        leaves = {parameter_path(keys): x for keys, x in jax.tree.leaves_with_path(abstract_params)}
        missing = [path for path in leaves if path not in places and path[-1] != ROUTED_BIAS]
        places = {path: place for path, place in places.items() if path in leaves}
        used = {name for place in places.values() for name in place.arrays}
        if missing:
            names = first_of([".".join(path) for path in missing], _MOST_NAMES)
            raise self._misfit(f"it has no array for {names}")
        if unused := sorted(available - used):
            names = first_of(unused, _MOST_NAMES)
            raise self._misfit(f"nothing here takes its {names}")
        arrays = {
            name.removeprefix(prefix): array
            for name, array in open_arrays(
                self._folder, sorted(prefix + name for name in used)
            ).items()
        }
        for path, place in places.items():
            self._check_shape(path, place, arrays, leaves[path].shape)
        return places, arrays

    def _check_shape(
        self,
        path: ParameterPath,
        place: Place,
        arrays: Mapping[str, StoredArray],
        shape: tuple[int, ...],
    ) -> None:
        one_layer = shape[1:] if place.is_stacked else shape
        if place.is_flat:
            one_layer = (math.prod(one_layer),)
        last: dict[str, int] = {}
        for name, number in zip(place.arrays, place.numbers or (None,), strict=True):
            last[name] = max(last.get(name, -1), -1 if number is None else number)
        for name, number in last.items():
            there = list(arrays[name].shape)
            if number >= 0 and len(there) > LAYER_AXIS:
                num_layers = there.pop(LAYER_AXIS)
                if num_layers != number + 1:
                    raise self._misfit(f"{name} has {num_layers} layers there, {number + 1} here")
            if tuple(there) != one_layer:
                raise self._misfit(
                    f"{name} is {tuple(there)} there, {one_layer} here ({'.'.join(path)})"
                )

    def _misfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.stated}: does not fit this model: {why}; a checkpoint of MaxText states no "
            "model: state its keys, such as model_name, which maxbatch import maxtext writes"
        )


def _field_of(keys: KeyPath) -> str:
    """Returns the field of an optimizer's state that a leaf belongs to."""
    fields = [entry.name for entry in keys if isinstance(entry, jax.tree_util.GetAttrKey)]
    return next((name for name in reversed(fields) if name != "value"), "")


def _counts_updates(keys: KeyPath) -> bool:
    return _field_of(keys) == "count" and not parameter_path(keys)


class _Reader(NamedTuple):
    """The reader of one parameter, or of its moment."""

    arrays: Mapping[str, StoredArray]
    place: Place
    scale: tuple[float, float]  # a factor of MaxText's values, and what is then added


def _read_all(wanted: Sequence[tuple[jax.ShapeDtypeStruct, _Reader | None]]) -> list[jax.Array]:
    """Reads arrays, the largest first, while most memory is free; zeros for those without a
    reader.
    """
    most_bytes = round_bytes([abstract for abstract, _ in wanted])
    arrays: dict[int, jax.Array] = {}
    for number in sorted(
        range(len(wanted)), key=lambda number: -math.prod(wanted[number][0].shape)
    ):
        abstract, reader = wanted[number]
        arrays[number] = (
            zeros_of(abstract)
            if reader is None
            else read_parameter(reader.arrays, reader.place, abstract, reader.scale, most_bytes)
        )
    return [arrays[number] for number in range(len(wanted))]
