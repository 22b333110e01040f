"""Loading of parameters: open a source, read its config, place the parameters, merge adapters.

A source is a named checkpoint, a run's newest checkpoint, a Hugging Face folder, or a MaxText
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from maxbatch.config.base_path import BASE_KEY
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.config import Config
from maxbatch.config.hub import folder_of
from maxbatch.config.sections import AdapterConfig, ModelConfig
from maxbatch.config.values import shown
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.parallel.trees import State
from maxbatch.run.weights.checkpoint_reading import RemovedError, StoredCheckpoint
from maxbatch.run.weights.foreign import ForeignState, open_foreign, open_foreign_state
from maxbatch.run.weights.origin import Reader, RunOrigin, Source, open_origin
from maxbatch.system.errors import ConfigError
from maxbatch.update.lora import adapters_of
from maxbatch.update.state import abstract_model

if TYPE_CHECKING:
    from maxbatch.update.adapters import Adapters

T = TypeVar("T")


def open_source(path: str | Path, averaged: bool = False, base: str = "") -> Source:
    """Opens the source at a path: a run folder (its newest checkpoint), `checkpoints/STEP` in it, a
    Hugging Face folder, a model's name on the Hugging Face hub, or a checkpoint of MaxText.

    Args:
      averaged: whether to read the run's average of the parameters (`parameter_average_half_life`).
      base: where the model that a run's adapters adapt is now; "": at the path that the run states.

    Raises:
      ConfigError: there is no source, or it has no average.
    """
    folder_of(path)  # raises for an unknown name on the hub
    foreign = open_foreign(path)
    if foreign is None:
        return StoredCheckpoint(path, averaged, base)
    source, form = foreign
    if averaged:
        raise ConfigError(
            f"--averaged: {shown(str(path))} is {form}, which has no average of its parameters; "
            "works: no --averaged"
        )
    return source


def open_state(path: str | Path) -> StoredCheckpoint | ForeignState:
    """Opens the parameters and the optimizer's state at a path: a run folder, its
    `checkpoints/STEP`, or another program's, such as MaxText's.

    Raises:
      ConfigError: there is none.
    """
    return open_foreign_state(path, "load_full_state_path") or StoredCheckpoint(path)


def open_parameters(source: Source, config: ModelConfig, abstract_params: State) -> Reader:
    """Returns a function that reads a whole model's parameters, all of `abstract_params` or some of
    them.

    Adapters are merged into their base model. Values are read only when the function is called.

    Raises:
      ConfigError: the source, or its base model, does not fit.
    """
    adapting = source.adapting()
    if adapting is None:
        return source.open(config, abstract_params)
    run = adapting.config
    try:
        base, _ = open_origin(
            open_source,
            BASE_KEY,
            run[BASE_KEY],
            adapting.origin,
            f"the run of {source}",
        )
    except ConfigError as error:
        raise ConfigError(f"{error}; works: {BASE_KEY}=PATH, wherever that model is now") from error
    adapters = _adapters_of(run.adapters)
    somewhere = jax.tree.leaves(abstract_params)[0].sharding
    where = (
        somewhere.mesh if isinstance(somewhere, NamedSharding) else next(iter(somewhere.device_set))
    )
    placed_adapters = placed(adapters.abstract(abstract_params), where)
    read_base, read_adapters = (
        open_parameters(base, config, abstract_params),
        source.open(config, placed_adapters),
    )
    trained = cache(lambda: read_adapters(placed_adapters))  # a model is read in parts

    def read(part: State) -> State:
        shardings = jax.tree.map(lambda x: x.sharding, part)
        merge = jax.jit(adapters.merged, out_shardings=shardings, donate_argnums=0)
        merged: State = merge(read_base(part), trained())
        return merged

    return read


class OpenedModel(NamedTuple):
    """A whole model, whose parameters are read into this host's memory one after another.

    Attributes:
      config: its keys.
      abstract: the shapes and types of its parameters, on this host.
      read: reads some of these parameters; adapters are merged into their base model.
      dtype: the type in which it is stored.
    """

    config: Config
    abstract: State
    read: Reader
    dtype: str


_NO_OVERRIDES: Mapping[str, Sequence[str]] = {}


def read_model(
    path: str | Path,
    use: Callable[[OpenedModel], T],
    averaged: bool = False,
    base: str = "",
    overrides: Mapping[str, Sequence[str]] = _NO_OVERRIDES,
) -> T:
    """Opens the model at a path and returns what `use` makes of it.

    If a run removes the checkpoint while `use` reads it, `use` starts again with a newer one.

    Args:
      averaged, base: as `open_source` takes them.
      overrides: "key=value" texts over the model's config, by its decoder_block.

    Raises:
      ConfigError: there is no such model, or its files contradict each other.
    """

    def opened(source: Source) -> OpenedModel:
        config = source.config()
        texts = list(overrides.get(config.decoder_block, ()))
        stored_dtype = source.stored_dtype
        if stored_dtype is not None:
            # float32 holds every value of the other types that are read
            texts.append("weight_dtype=float32")
        config = source.config(texts) if texts else config
        abstract = placed(abstract_model(config.decoder)[1], this_host())
        read = open_parameters(source, config.model, abstract)
        return OpenedModel(config, abstract, read, stored_dtype or config.weight_dtype)

    return _until_kept(open_source(path, averaged, base), lambda source: use(opened(source)))


def _until_kept(source: Source, read: Callable[[Source], T]) -> T:
    """Calls `read` with a source, or with a newer checkpoint if a run removes this one meanwhile,
    and returns its result.
    """
    while True:
        try:
            return read(source)
        except RemovedError:
            newer = source.newer() if isinstance(source, StoredCheckpoint) else None
            if newer is None:
                raise
            source = newer


def load_parameters(
    path: str | Path, *, averaged: bool = False, load_parameters_path: str | Path = ""
) -> dict[Any, Any]:
    """Returns the parameters of a run or a checkpoint, of the user's own model too.

    Args:
      path: a run folder (its newest checkpoint), or one of its checkpoints.
      averaged: whether to take the average of the parameters that the run keeps
        (`parameter_average_half_life`).
      load_parameters_path: where the base model of a run's adapters is now, if it was moved.

    Returns:
      Arrays of NumPy in nested dicts, by the model's own paths: the keys are names of attributes,
      and whole numbers in lists. Adapters are merged into their model.

    Raises:
      ConfigError: there is no such checkpoint, it has no average, or it is damaged.
    """
    leave_out_absent_tpu()
    source, device = open_checkpoint(path, averaged, str(load_parameters_path)), this_host()
    if source.adapting() is not None:
        config = source.config().decoder
        params = placed(abstract_model(config)[1], device)
        read = open_parameters(source, config, params)(params)
    else:
        params = source.parameter_shapes(device)
        read = source.parameters(params)
    arrays: dict[Any, Any] = nnx.to_pure_dict(jax.tree.map(np.array, read))
    return arrays


def open_checkpoint(path: str | Path, averaged: bool, base: str = "") -> StoredCheckpoint:
    """Opens a checkpoint of ours; raises ConfigError for another kind of model."""
    source = open_source(str(path), averaged, base)
    if not isinstance(source, StoredCheckpoint):
        raise ConfigError(
            f"{path}: is a Hugging Face folder, not a run or one of its checkpoints; "
            f"works: maxbatch.load_model({str(path)!r}).params"
        )
    return source


class FirstParameters:
    """The parameters that a run starts from; their headers are read once, with the first `open`."""

    def __init__(self, origin: RunOrigin, config: ModelConfig) -> None:
        self.origin, self._config = origin, config
        self._opened: tuple[Source, Reader] | None = None

    def open(self, abstract_params: State) -> Reader | None:
        """Returns a function that reads them; None if they are made.

        Args:
          abstract_params: shapes and shardings of the model's parameters.
        """
        if (source := self.origin.source()) is None:
            return None

        def reader_of(source: Source) -> Reader:
            if self._opened is None or self._opened[0] is not source:
                self._opened = source, open_parameters(source, self._config, abstract_params)
            return self._opened[1]

        reader_of(source)
        return lambda part: self.origin.read_from(lambda source: reader_of(source)(part))


def placed(params: State, where: Mesh | jax.Device) -> State:
    """Adds shardings to abstract parameters: on a mesh, or on one device."""
    if isinstance(where, Mesh):
        shardings = parameter_shardings(params, where)
    else:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(where), params)
    placed_params: State = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, shardings
    )
    return placed_params


def this_host() -> jax.Device:
    """Returns the device of this host's memory."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was restricted to the accelerators
        return jax.local_devices()[0]


def restored(
    source: Source, config: DecoderConfig, mesh: Mesh | None = None
) -> tuple[nnx.GraphDef[nnx.Module], State]:
    """Reads the model graph and parameters of a source onto a mesh, or (None) the first device.

    Raises:
      ConfigError: the source does not fit the config, or is damaged.
    """
    graphdef, abstract = abstract_model(config)
    abstract = placed(abstract, mesh or jax.devices()[0])
    params = _until_kept(source, lambda source: open_parameters(source, config, abstract)(abstract))
    return graphdef, params


def load_adapters(
    path: str | Path, averaged: bool = False, base_path: str = ""
) -> tuple[Config, State, Adapters, State]:
    """Returns the config of a run with adapters, the shapes of its base model, and the adapters.

    Raises:
      ConfigError: there is no such run or checkpoint, or it has no adapters.
    """
    source = open_source(path, averaged, base_path)
    adapting = source.adapting()
    if adapting is None:
        raise ConfigError(f"{path}: has no adapters, which a run with lora_rank above 0 trains")
    config = adapting.config
    adapters, (_, base) = _adapters_of(config.adapters), abstract_model(config.decoder)
    abstract = placed(adapters.abstract(base), jax.devices()[0])
    return config, base, adapters, source.open(config.model, abstract)(abstract)


def _adapters_of(config: AdapterConfig) -> Adapters:
    adapters = adapters_of(config)
    assert adapters is not None, "the run trained adapters"
    return adapters
