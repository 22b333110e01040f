"""Parameters of a run, a checkpoint or a Hugging Face folder, to sample from or to start another run with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.config.huggingface import is_huggingface_folder
from maxbatch.config.loading import load_config
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.runs.position import committed_steps
from maxbatch.system.errors import ConfigError, cannot_read
from maxbatch.system.storage import AnyPath, as_path
from maxbatch.training.array_files import arrays_handler, os_error, plain_path, reason, restore_as
from maxbatch.training.huggingface import read_parameters
from maxbatch.training.state import TrainState, abstract_model


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


def restore_parameters(path: str | Path, config: ConfigDict, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a run folder, a checkpoint or a Hugging Face folder, placed as `abstract_params` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model has another shape than the config's.
    """
    if is_huggingface_folder(path):
        return read_parameters(path, config, abstract_params)
    checkpoint = _find_checkpoint(path)
    with plain_path(checkpoint) as folder, ocp.Checkpointer(arrays_handler()) as checkpointer:
        try:
            return checkpointer.restore(folder / "params", args=restore_as(abstract_params))
        except (OSError, ValueError, KeyError) as error:
            if failure := os_error(error, checkpoint):
                raise cannot_read(checkpoint, failure) from None
            raise ConfigError(
                f"load_parameters_path={path}: its parameters do not fit this model ({reason(error)})"
            ) from error


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
