"""A checkpoint as a source of parameters: the named checkpoint, whole, or an error.

Every array is read once and checked against its checksum.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from maxbatch.config.config import Config
from maxbatch.config.keys import Fixes
from maxbatch.config.loading import load_config
from maxbatch.config.own_parts import own_parts_of
from maxbatch.config.sections import ModelConfig, names_fixing
from maxbatch.config.values import shown, shown_path
from maxbatch.families.forms.experts import ROUTED_BIAS
from maxbatch.parallel.hosts import warn
from maxbatch.parallel.sharding import zeros_of
from maxbatch.parallel.trees import KeyPath, State, TreeOf
from maxbatch.run.folder.best_checkpoint import find_best, names_best
from maxbatch.run.folder.foreign import ITEMS
from maxbatch.run.folder.old_forms import refuse_old_checkpoint, refuse_old_record
from maxbatch.run.folder.position import (
    CheckpointRecord,
    DamagedError,
    Origin,
    StoredParameter,
    is_committed,
    last_saved,
    read_record,
)
from maxbatch.run.weights.checksums import (
    array_checksums,
    damage_of_parameters,
    damage_of_state,
    parameter_name,
    warn_of_no_checksums,
)
from maxbatch.run.weights.shard_files import INDEX, OTHER_ARRAYS, read_index
from maxbatch.run.weights.shards import read_item, read_together
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.storage import AnyPath, as_path, missing_folder
from maxbatch.update.state import TrainState, average_shapes, first_average

OWN_MODEL = "own"  # in the model's identity, in place of the keys of the config's own model
# in the name of a stored array
_STEP_OF_PATH = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+)\]""")
_OF_ORBAX = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")
_GIVE = (
    "give a run folder with checkpoints/, one of checkpoints/STEP, a Hugging Face folder "
    "(config.json), or a MaxText checkpoint"
)


class Adapting(NamedTuple):
    """The run of adapters."""

    config: Config
    origin: Origin | None  # the adapted model; None: the run does not state it


class RemovedError(ConfigError):
    """A checkpoint that its run removed after it was opened."""


class StoredCheckpoint:
    """A checkpoint to read (`maxbatch.run.weights.origin.Source`).

    Args:
      path: a run folder, for its newest checkpoint, or `checkpoints/STEP` in it.
      averaged: whether to read the run's average of the parameters.
      base: where the model that its adapters adapt is now; "": at the path that its run states.

    Attributes:
      folder: the checkpoint's folder.
      record: the content of its JSON.

    Raises:
      ConfigError: there is no checkpoint, its JSON is invalid, it has no average, or it is in a
        form of maxbatch 0.4 or before.
    """

    def __init__(self, path: str | Path, averaged: bool = False, base: str = "") -> None:
        self._path, self._averaged = path, averaged
        self._base = base
        self._moved = [f"load_parameters_path={base}"] if base else []
        while True:
            self.folder = find_checkpoint(path)
            refuse_old_checkpoint(self.folder)
            try:
                self.record: CheckpointRecord = read_record(self.folder)
                break
            except DamagedError as error:
                if not (self._is_removed and self._names_a_run):
                    raise _damaged(self.folder, str(error)) from None
        refuse_old_record(self.folder, self.record)
        if averaged and self.record.average is None:
            raise ConfigError(
                f"--averaged: {self.folder} has no average of the parameters, which a run with "
                "parameter_average_half_life keeps; works: no --averaged"
            )

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def _names_a_run(self) -> bool:
        return self.folder != as_path(self._path).absolute()

    @property
    def _is_removed(self) -> bool:
        return not (self.folder.is_dir() and is_committed(self.folder))

    def newer(self) -> StoredCheckpoint | None:
        """Returns the newest checkpoint of the named run if it has removed this one; else None."""
        if not (self._is_removed and self._names_a_run):
            return None
        newest = StoredCheckpoint(self._path, self._averaged, self._base)
        warn(
            f"{self.folder}: its run removed it while it was read; {newest.folder} is read instead"
        )
        return newest

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config of its run, with "key=value" texts over it; without them the model
        computes in `dtype`.

        Raises:
          ConfigError: `config.yml` cannot be read, or its model differs from the checkpoint's.
        """
        file, stored = self._config_file, self.record.identity["model"]
        config = load_config(file, self._moved)
        if self.is_own:
            name = own_parts_of(config.own_parts).get("model", "MyModel")
            raise ConfigError(
                f"{shown_path(self._path)}: holds a model of one's own ({name}), which only "
                f"Python can call; works: maxbatch.load_model({str(self._path)!r}, "
                f"model={name.rpartition('.')[2]})"
            )
        names = names_fixing(Fixes.MODEL) + (
            names_fixing(Fixes.ADAPTERS) if config.lora_rank else ()
        )
        for key in names:
            if key in stored and stored[key] != config[key]:
                there, here = (shown(repr(value)) for value in (config[key], stored[key]))
                raise ConfigError(
                    f"{file}: states {key}={there}, and the checkpoint {self.folder} {here}; "
                    "restore it"
                )
        return load_config(file, ["quantization=", *self._moved, *overrides])

    @property
    def _config_file(self) -> str:
        return str(self.folder.parent.parent / "config.yml")

    @property
    def is_own(self) -> bool:
        """Whether its model is a user's own, which `train` was given."""
        return self.record.identity["model"].get("model") == OWN_MODEL

    def config_of_run(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config of its run, with "key=value" texts over it; it does not describe a
        user's own model.
        """
        return load_config(self._config_file, overrides)

    def parameter_shapes(self, device: jax.Device) -> State:
        """Returns the shapes and paths of the stored parameters, whatever the model, for reading
        onto a device.

        Raises:
          ConfigError: its index is damaged.
        """
        item = self.folder / ("average" if self._averaged else "params")
        try:
            with reading(item):
                stored, _ = read_index(item / INDEX)
        except (DamagedError, FileNotFoundError) as error:
            why = (
                f"{item.name}/{INDEX} is missing"
                if isinstance(error, FileNotFoundError)
                else str(error)
            )
            raise _damaged(self.folder, why) from None
        place = SingleDeviceSharding(device)
        return nnx.from_flat_state(
            {
                tuple(map(ast.literal_eval, _STEP_OF_PATH.findall(form.name))): nnx.Param(
                    jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=place)
                )
                for form in stored.forms
            }
        )

    @property
    def identity(self) -> str:
        """A hash of its step, its model, its arrays' checksums and its run's origin."""
        record = self.record
        contents = (
            record.position.step,
            record.checksum,
            record.parameters,
            record.average,
            record.identity["model"],
        )
        facts = json.dumps([*contents, record.origin and record.origin.identity], sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def identity_like(self, other: str) -> str:
        """Returns the identity; checkpoints have only one form."""
        return self.identity

    @property
    def stored_dtype(self) -> None:
        """None: its config states the type."""

    @property
    def step(self) -> int:
        """The number of updates before it."""
        return self.record.position.step

    def adapting(self) -> Adapting | None:
        """Returns the run of its adapters; None for a whole model."""
        if not self.record.identity["model"].get("lora_rank"):
            return None
        return Adapting(self.config(), self.record.origin)

    def open(self, config: ModelConfig, abstract_params: State) -> Callable[[State], State]:
        """Checks shapes against the model; returns a function that reads the parameters or the
        adapters.

        Routers start with a zero bias if the checkpoint has none.
        """
        bias, held = _split_bias(abstract_params)
        if not bias or self.record.identity["model"].get(ROUTED_BIAS) is not False:
            self.check_shapes(abstract_params)
            return lambda part: self.parameters(part, partial=part is not abstract_params)
        self.check_shapes(held)

        def read(part: State) -> State:
            bias, held = _split_bias(part)
            zeros: State = jax.tree.map(zeros_of, bias)
            if not held:
                return zeros
            merged: State = nnx.merge_state(
                zeros, self.parameters(held, partial=part is not abstract_params)
            )
            return merged

        return read

    def check_shapes(self, abstract_params: State, key: str = "load_parameters_path") -> None:
        """Raises ConfigError, naming `key`, if shapes differ from the model's."""
        # without them, they are compared on reading
        stored = self.record.parameters or {}
        for keys, x in jax.tree.leaves_with_path(abstract_params):
            name = parameter_name(keys)
            there = stored[name].shape if name in stored else x.shape
            if there != x.shape:
                raise self._misfit(f"{name} is {there} there, {x.shape} here", key)
        wanted = {parameter_name(keys) for keys, _ in jax.tree.leaves_with_path(abstract_params)}
        for name in sorted(wanted ^ stored.keys()) if stored else ():
            raise self._misfit(f"{name} is only {'there' if name in stored else 'here'}", key)

    def _misfit(self, why: str, key: str = "load_parameters_path") -> ConfigError:
        return ConfigError(f"{key}={self._path}: its parameters do not fit this model ({why})")

    def parameters(self, abstract_params: State, partial: bool = False) -> State:
        """Reads parameters onto the shardings of `abstract_params`; `partial`: the checkpoint has
        others too.

        Raises:
          ConfigError: they are damaged, or cannot be read.
        """
        stored = self.record.average if self._averaged else self.record.parameters
        if stored is None:
            warn_of_no_checksums(self.folder)
            return self._restore("params", abstract_params, partial)
        leaves, tree = jax.tree.flatten_with_path(abstract_params)
        if all(stored[parameter_name(keys)].dtype == str(x.dtype) for keys, x in leaves):
            return self._checked(stored, abstract_params, partial)
        # Checksums need the stored types. One at a time, since both types of all parameters may not
        # fit.
        converted: State = jax.tree.unflatten(
            tree, [self._converted(stored, keys, x) for keys, x in leaves]
        )
        return converted

    def _converted(
        self, stored: dict[str, StoredParameter], keys: KeyPath, wanted: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Reads a parameter and converts its type."""
        path = tuple(entry.key for entry in keys if hasattr(entry, "key"))
        there = jax.ShapeDtypeStruct(
            wanted.shape, stored[parameter_name(keys)].dtype, sharding=wanted.sharding
        )
        part = nnx.from_flat_state({path: nnx.Param(there)})
        array: jax.Array
        (array,) = jax.tree.leaves(self._checked(stored, part, partial=True))
        return array.astype(wanted.dtype)

    def _checked(
        self, stored: dict[str, StoredParameter], abstract_params: State, partial: bool
    ) -> State:
        params = self._restore("average" if self._averaged else "params", abstract_params, partial)
        if damage := damage_of_parameters(stored, params, array_checksums(params)):
            raise _damaged(self.folder, damage)
        return params

    def full_state(self, abstract: TrainState) -> TrainState:
        """Reads the parameters and the optimizer's state onto the shardings of `abstract`.

        An average of the parameters continues from the checkpoint's, or starts as the parameters.

        Raises:
          ConfigError: they are damaged, or belong to another model or optimizer.
        """
        self.check_shapes(abstract.params, "load_full_state_path")
        params = self._restore("params", abstract.params)
        average = None
        if self.record.average is not None:
            average = self._restore("average", average_shapes(abstract.params))
        state = TrainState(params, self._restore("opt_state", abstract.opt_state), average=average)
        if self.record.parameters is None:
            warn_of_no_checksums(self.folder)
        if damage := damage_of_state(self.record, state, array_checksums):
            raise _damaged(self.folder, damage)
        if abstract.average is None:
            average = None
        elif average is None:
            average = first_average(params)
        return state._replace(average=average)

    def _restore(self, item: str, abstract: TreeOf, partial: bool = False) -> TreeOf:
        tree, damage = read_together(
            lambda: read_item(self.folder / item, abstract, partial), self.folder
        )
        if damage and OTHER_ARRAYS in damage:
            raise self._other_arrays(item, damage)
        if damage or tree is None:
            raise _damaged(self.folder, damage or "it holds nothing")
        return tree

    def _other_arrays(self, item: str, why: str) -> ConfigError:
        if item == "params" and self.record.parameters is not None:  # shapes agree with the model
            return _damaged(self.folder, why)
        if item == "params":
            return self._misfit(why)
        return ConfigError(
            f"load_full_state_path={self._path}: is of another model or optimizer ({why}); "
            "load_parameters_path takes the parameters alone"
        )


def _split_bias(params: State) -> tuple[State, State]:
    """Splits parameters into routers' biases and all others."""
    bias, rest = nnx.split_state(params, nnx.PathContains(ROUTED_BIAS), ...)
    return bias, rest


def is_checkpoint(folder: AnyPath) -> bool:
    """Returns whether a folder is a checkpoint, not a run folder."""
    return any((folder / item).is_dir() for item in ITEMS)


def find_checkpoint(path: str | Path) -> AnyPath:
    """Returns the folder of the named checkpoint, or of a run's newest; never a substitute.

    Raises:
      ConfigError: there is none.
    """
    if names_best(as_path(path)):
        return find_best(as_path(path).absolute())
    if missing := missing_folder(as_path(path)):
        raise ConfigError(f"{shown_path(path)}: {missing}; {_GIVE}")
    folder = as_path(path).absolute()
    if is_checkpoint(folder):
        return folder
    step = last_saved(folder)
    newest = None if step is None else folder / "checkpoints" / str(step)
    if newest is not None and is_checkpoint(newest):
        return newest
    if is_of_orbax(folder):
        raise ConfigError(
            f"{folder}: is an Orbax checkpoint in another form than MaxText's, which is not read; "
            "convert it to a Hugging Face folder with the trainer that wrote it, and give that "
            "folder"
        )
    if newest is not None:
        return newest  # what is wrong with it is said where it is read
    raise ConfigError(f"{folder}: no checkpoint here; {_GIVE}")


def is_of_orbax(folder: AnyPath) -> bool:
    """Returns whether Orbax wrote a folder, a step in it, or the steps of the run in it."""
    places = [folder, folder / "checkpoints"]
    for place in list(places):
        steps = (
            [child for child in place.iterdir() if child.name.isdigit()] if place.is_dir() else []
        )
        places += steps[:1]
    inner = [place / item for place in places for item in ("items", "default", "state")]
    return any((place / mark).is_file() for place in (*places, *inner) for mark in _OF_ORBAX)


def _damaged(folder: AnyPath, damage: str) -> ConfigError:
    if not (folder.is_dir() and is_committed(folder)):
        return RemovedError(
            f"{folder}: its run removed it while it was read, since it keeps only its newest "
            "checkpoints (max_num_checkpoints_to_keep); name a newer one, or the run's folder "
            "for the newest"
        )
    return ConfigError(
        f"{folder}: is damaged ({damage}); no other checkpoint takes its place: name another to "
        "use it"
    )
