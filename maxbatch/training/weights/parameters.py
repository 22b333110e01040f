"""Parameters of a run, a checkpoint or a Hugging Face folder, to sample from or to start another run with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.config.huggingface import is_huggingface_folder
from maxbatch.config.loading import load_config
from maxbatch.config.sections import AdapterConfig, ModelConfig
from maxbatch.config.values import shown
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.system.errors import ConfigError
from maxbatch.training.update.adapters import Adapters
from maxbatch.training.update.state import TrainState, abstract_model
from maxbatch.training.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.training.weights.huggingface_reading import parameter_reader

Reader = Callable[[nnx.State], nnx.State]

_BLOCKS, _BLOCK_BYTES = 64, 4096  # of a file, in the identity of a model


def config_of_model(path: str | Path, overrides: Sequence[str] = ()) -> ConfigDict:
    """Returns the config of a run folder, one of its `checkpoints/STEP`, or a Hugging Face folder.

    Raises:
      ConfigError: there is no such run, checkpoint or folder, or its model is not supported.
    """
    if is_huggingface_folder(path):
        return load_config(overrides=["model_name=auto", f"load_parameters_path={path}", *overrides])
    return StoredCheckpoint(path).config(overrides)


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
    graphdef, params = abstract_model(DecoderConfig.of(config))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = parameter_shardings(params, mesh) if mesh else jax.tree.map(lambda _: device, params)
    params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)
    return config, graphdef, restore_parameters(path, ModelConfig.of(config), params)


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
    _, params = abstract_model(DecoderConfig.of(config))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params)
    return StoredModel(config, params, open_parameters(path, ModelConfig.of(config), params))


def restore_parameters(path: str | Path, config: ModelConfig, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a run folder, a checkpoint or a Hugging Face folder, placed as `abstract_params` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model has another shape than the config's.
    """
    return open_parameters(path, config, abstract_params)(abstract_params)


def open_parameters(path: str | Path, config: ModelConfig, abstract_params: nnx.State) -> Reader:
    """Returns a function that reads parameters of a model: those of `abstract_params`, or some of them.

    No values are read before it is called; headers and records are.

    Raises:
      ConfigError: there is no such model, or what its headers and records say does not fit.
    """
    if is_huggingface_folder(path):
        return parameter_reader(path, config, abstract_params)
    checkpoint = StoredCheckpoint(path)
    own = _adapted_config(checkpoint)
    if own is not None:
        base = own.load_parameters_path
        return _merged_reader(checkpoint, AdapterConfig.of(own), base, config, abstract_params)
    checkpoint.check_shapes(abstract_params)
    return lambda part: checkpoint.parameters(part, partial=part is not abstract_params)


def load_adapters(path: str | Path) -> tuple[ConfigDict, nnx.State, nnx.State]:
    """Returns the config of a run with adapters, the shapes of the model that they adapt, and the adapters.

    Raises:
      ConfigError: there is no such run or checkpoint, or it has no adapters.
    """
    checkpoint = None if is_huggingface_folder(path) else StoredCheckpoint(path)
    config = checkpoint and _adapted_config(checkpoint)
    adapters = config and Adapters.from_config(AdapterConfig.of(config))
    if not (checkpoint and config and adapters):
        raise ConfigError(f"{path}: has no adapters, which a run with lora_rank above 0 trains")
    _, base = abstract_model(DecoderConfig.of(config))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = adapters.abstract(base)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    return config, base, _checked_adapters(checkpoint, placed)


def _adapted_config(checkpoint: StoredCheckpoint) -> ConfigDict | None:
    """Returns the config of a checkpoint's run if the checkpoint holds adapters, else None."""
    return checkpoint.config() if checkpoint.record.identity["model"].get("lora_rank") else None


def _checked_adapters(checkpoint: StoredCheckpoint, abstract: nnx.State) -> nnx.State:
    checkpoint.check_shapes(abstract)
    return checkpoint.parameters(abstract)


def _merged_reader(
    checkpoint: StoredCheckpoint, trained_as: AdapterConfig, base: str, config: ModelConfig, abstract_params: nnx.State
) -> Reader:
    """Returns a function that reads parameters of a model and merges the adapters of a checkpoint into them.

    Args:
      checkpoint: holds adapters.
      trained_as: the keys of the adapters in its run.
      base: `load_parameters_path` of its run: the model that they adapt.
      config: the model, as the caller wants it.
      abstract_params: its shapes and places.
    """
    stated = checkpoint.record.identity["model"].get("base")
    if stated != base_identity(base):
        raise ConfigError(
            f"{checkpoint.folder}: holds adapters of another model than load_parameters_path={shown(repr(base))} is "
            "now; put back the one that they were trained on"
        )
    adapters = Adapters.from_config(trained_as)
    assert adapters is not None, "the checkpoint holds adapters"
    abstract = adapters.abstract(abstract_params)
    somewhere = jax.tree.leaves(abstract_params)[0].sharding
    mesh = getattr(somewhere, "mesh", None)
    shardings = parameter_shardings(abstract, mesh) if mesh else jax.tree.map(lambda _: somewhere, abstract)
    placed = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract, shardings)
    trained = cache(partial(_checked_adapters, checkpoint, placed))  # a model is read in several parts
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
    record = StoredCheckpoint(path).record
    digest.update(f"{record.position.step} {record.checksum} {record.identity['model']}".encode())
    return digest.hexdigest()


def _blocks(file: Path) -> bytes:
    """Returns blocks of a file, evenly spread from its first to its last byte."""
    last = max(0, file.stat().st_size - _BLOCK_BYTES)
    with open(file, "rb") as stream:
        return b"".join(
            stream.read(_BLOCK_BYTES) for block in range(_BLOCKS) if stream.seek(block * last // (_BLOCKS - 1)) >= 0
        )


def restore_full_state(path: str | Path, abstract: TrainState) -> TrainState:
    """Returns the parameters and the optimizer's state of a run folder or checkpoint, placed as `abstract` says.

    Raises:
      ConfigError: there is no such checkpoint, it is damaged, or its model or its optimizer is another.
    """
    return StoredCheckpoint(path).full_state(abstract)
