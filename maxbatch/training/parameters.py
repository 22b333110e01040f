"""Parameters of a run, a checkpoint or a Hugging Face folder, to sample from or to start another run with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.config.huggingface import is_huggingface_folder
from maxbatch.config.loading import load_config
from maxbatch.config.values import shown
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.runs.position import CheckpointRecord, DamagedError, committed_steps, read_record
from maxbatch.system.errors import ConfigError, cannot_read
from maxbatch.system.storage import AnyPath, as_path
from maxbatch.training.adapters import Adapters
from maxbatch.training.array_files import arrays_handler, os_error, plain_path, reason, restore_as
from maxbatch.training.huggingface import parameter_path
from maxbatch.training.huggingface_reading import parameter_reader
from maxbatch.training.state import TrainState, abstract_model

Reader = Callable[[nnx.State], nnx.State]

_BLOCKS, _BLOCK_BYTES = 64, 4096  # of a file, in the identity of a model


def config_of_model(path: str | Path, overrides: Sequence[str] = ()) -> ConfigDict:
    """Returns the config of a run folder, one of its `checkpoints/STEP`, or a Hugging Face folder.

    Raises:
      ConfigError: there is no such run, checkpoint or folder, or its model is not supported.
    """
    if is_huggingface_folder(path):
        return load_config(overrides=["model_name=auto", f"load_parameters_path={path}", *overrides])
    return load_config(str(_find_checkpoint(path).parent.parent / "config.yml"), overrides)


def load_parameters(
    path: str | Path, overrides: Sequence[str] = (), mesh: Mesh | None = None
) -> tuple[ConfigDict, nnx.GraphDef[Any], nnx.State]:
    """Returns the config, the model graph and the parameters of a model.

    Args:
      path: a run folder (its newest checkpoint), one of its `checkpoints/STEP`, or a Hugging Face folder.
      overrides: "key=value" texts over its config.
      mesh: the mesh that holds the parameters; None: the first device.

    Raises:
      ConfigError: there is no such run, checkpoint or folder, or its model is not supported.
    """
    config = config_of_model(path, overrides)
    graphdef, params = abstract_model(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = parameter_shardings(params, mesh) if mesh else jax.tree.map(lambda _: device, params)
    params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)
    return config, graphdef, restore_parameters(path, config, params)


class StoredModel(NamedTuple):
    """A model whose parameters are read when they are asked for."""

    config: ConfigDict
    abstract: nnx.State  # the shapes, types and places of all parameters
    read: Reader  # returns the parameters of a part of `abstract`


def open_model(path: str | Path, overrides: Sequence[str] = ()) -> StoredModel:
    """Returns a model whose parameters are read into the memory of this host, as many at a time as are asked for.

    Args:
      path: a run folder, one of its checkpoints, or a Hugging Face folder.
      overrides: "key=value" texts over its config.

    Raises:
      ConfigError: there is no such run, checkpoint or folder, or its model is not supported.
    """
    config = config_of_model(path, overrides)
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to know the accelerators only
        device = jax.local_devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    _, params = abstract_model(config)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params)
    return StoredModel(config, params, open_parameters(path, config, params))


def restore_parameters(path: str | Path, config: ConfigDict, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a run folder, a checkpoint or a Hugging Face folder, placed as `abstract_params` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model has another shape than the config's.
    """
    return open_parameters(path, config, abstract_params)(abstract_params)


def open_parameters(path: str | Path, config: ConfigDict, abstract_params: nnx.State) -> Reader:
    """Returns a function that reads parameters of a model: those of `abstract_params`, or some of them.

    No values are read before it is called; headers and records are.

    Raises:
      ConfigError: there is no such model, or what its headers and records say does not fit.
    """
    if is_huggingface_folder(path):
        return parameter_reader(path, config, abstract_params)
    checkpoint = _find_checkpoint(path)
    own = _adapted_config(checkpoint)
    if own is not None:
        return _merged_reader(checkpoint, own, config, abstract_params)
    _check_shapes(path, checkpoint, abstract_params)
    return lambda part: _restore(path, checkpoint, part, partial=part is not abstract_params)


def _check_shapes(path: str | Path, checkpoint: AnyPath, abstract_params: nnx.State) -> None:
    """Raises ConfigError for a checkpoint on this machine whose parameters have other shapes, before it is read."""
    if not isinstance(checkpoint, Path):
        return
    try:
        stored = arrays_handler().metadata(checkpoint / "params")
    except (OSError, ValueError, KeyError):
        return  # it is damaged: reading it says how
    # Orbax keeps a parameter as a dict, whose one entry is "value".
    shapes = {parameter_path(keys[:-1]): tuple(x.shape) for keys, x in jax.tree.leaves_with_path(stored.tree)}
    for keys, x in jax.tree.leaves_with_path(abstract_params):
        there = shapes.get(parameter_path(keys), x.shape)
        if there != x.shape:
            raise _misfit(path, f"{'.'.join(parameter_path(keys))} is {there} there, {x.shape} here")


def _misfit(path: str | Path | AnyPath, why: str) -> ConfigError:
    return ConfigError(f"load_parameters_path={path}: its parameters do not fit this model ({why})")


def load_adapters(path: str | Path) -> tuple[ConfigDict, nnx.State, nnx.State]:
    """Returns the config of a run with adapters, the shapes of the model that they adapt, and the adapters.

    Raises:
      ConfigError: there is no such run or checkpoint, or it has no adapters.
    """
    checkpoint = None if is_huggingface_folder(path) else _find_checkpoint(path)
    config = checkpoint and _adapted_config(checkpoint)
    adapters = config and Adapters.from_config(config)
    if not (checkpoint and config and adapters):
        raise ConfigError(f"{path}: has no adapters, which a run with lora_rank above 0 trains")
    _, base = abstract_model(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = adapters.abstract(base)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    return config, base, _restore(path, checkpoint, placed)


def _restore(
    path: str | Path | AnyPath, checkpoint: AnyPath, abstract_params: nnx.State, partial: bool = False
) -> nnx.State:
    with plain_path(checkpoint) as folder, ocp.Checkpointer(arrays_handler()) as checkpointer:
        try:
            return checkpointer.restore(folder / "params", args=restore_as(abstract_params, partial))
        except (OSError, ValueError, KeyError) as error:
            if failure := os_error(error, checkpoint):
                raise cannot_read(checkpoint, failure) from None
            raise _misfit(path, reason(error)) from error


def _adapted_config(checkpoint: AnyPath) -> ConfigDict | None:
    """Returns the config of a checkpoint's run if the checkpoint holds adapters, else None."""
    file = checkpoint.parent.parent / "config.yml"
    config = load_config(str(file)) if file.is_file() else None
    return config if config is not None and config.lora_rank else None


def _merged_reader(checkpoint: AnyPath, own: ConfigDict, config: ConfigDict, abstract_params: nnx.State) -> Reader:
    """Returns a function that reads parameters of a model and merges the adapters of a checkpoint into them.

    Args:
      checkpoint: holds adapters.
      own: the config of its run, which names the model that they adapt.
      config: of the model, as the caller wants it.
      abstract_params: its shapes and places.
    """
    base = own.load_parameters_path
    stated = _record(checkpoint).identity["model"].get("base")
    if stated != base_identity(base):
        raise ConfigError(
            f"{checkpoint}: holds adapters of another model than load_parameters_path={shown(repr(base))} is now; "
            "put back the one that they were trained on"
        )
    adapters = Adapters.from_config(own)
    assert adapters is not None, "the checkpoint holds adapters"
    abstract = adapters.abstract(abstract_params)
    somewhere = jax.tree.leaves(abstract_params)[0].sharding
    mesh = getattr(somewhere, "mesh", None)
    shardings = parameter_shardings(abstract, mesh) if mesh else jax.tree.map(lambda _: somewhere, abstract)
    placed = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract, shardings)
    trained = cache(partial(_restore, checkpoint, checkpoint, placed))  # a model is read in several parts
    read = open_parameters(base, config, abstract_params)

    def merged(part: nnx.State) -> nnx.State:
        shardings = jax.tree.map(lambda x: x.sharding, part)
        return jax.jit(adapters.merged, out_shardings=shardings, donate_argnums=0)(read(part), trained())

    return merged


def base_identity(path: str | Path) -> str:
    """Returns what identifies the parameters of a run, a checkpoint or a Hugging Face folder, wherever they lie.

    Of a checkpoint that is its step and the checksum of its arrays; of a folder the sizes of its safetensors files and
    blocks of 4 kB spread over each, and its `config.json`: reading them whole would take as long as loading them.
    """
    digest = hashlib.blake2b(digest_size=16)
    if is_huggingface_folder(path):
        folder = Path(path).expanduser()
        for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_blocks(file))
        return digest.hexdigest()
    record = _record(_find_checkpoint(path))
    digest.update(f"{record.position.step} {record.checksum} {record.identity['model']}".encode())
    return digest.hexdigest()


def _blocks(file: Path) -> bytes:
    """Returns blocks of a file, evenly spread from its first to its last byte."""
    last = max(0, file.stat().st_size - _BLOCK_BYTES)
    with open(file, "rb") as stream:
        return b"".join(
            stream.read(_BLOCK_BYTES) for block in range(_BLOCKS) if stream.seek(block * last // (_BLOCKS - 1)) >= 0
        )


def _record(checkpoint: AnyPath) -> CheckpointRecord:
    """Returns what the JSON of a checkpoint says; raises ConfigError if it cannot be trusted."""
    if not checkpoint.name.isdigit():
        raise ConfigError(f"{checkpoint}: adapters need a run folder, or one of its checkpoints/STEP")
    try:
        return read_record(checkpoint.parent.parent, int(checkpoint.name))
    except DamagedError as error:
        raise ConfigError(f"{checkpoint}: cannot be used: {error}") from error


def restore_full_state(path: str | Path, abstract: TrainState) -> TrainState:
    """Returns the parameters and the optimizer's state of a run folder or checkpoint, placed as `abstract` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model or its optimizer is another.
    """
    checkpoint = _find_checkpoint(path)
    with plain_path(checkpoint) as folder, ocp.Checkpointer(arrays_handler()) as checkpointer:
        try:
            params = checkpointer.restore(folder / "params", args=restore_as(abstract.params))
            return TrainState(params, checkpointer.restore(folder / "opt_state", args=restore_as(abstract.opt_state)))
        except (OSError, ValueError, KeyError) as error:
            if failure := os_error(error, checkpoint):
                raise cannot_read(checkpoint, failure) from None
            raise ConfigError(
                f"load_full_state_path={path}: is of another model or optimizer ({reason(error)}); "
                "load_parameters_path takes the parameters alone"
            ) from error


def _find_checkpoint(path: str | Path) -> AnyPath:
    folder = as_path(path)
    if (folder / "params").is_dir():
        return folder
    for step in committed_steps(folder):
        if (folder / "checkpoints" / str(step) / "params").is_dir():
            return folder / "checkpoints" / str(step)
    raise ConfigError(
        f"{folder}: no checkpoint here; give a run folder with checkpoints/, one of checkpoints/STEP, or "
        "a Hugging Face folder (config.json)"
    )
