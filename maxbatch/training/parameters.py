"""Parameters of a run or a checkpoint, to sample from or to start another run with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from ml_collections import ConfigDict

from maxbatch.config.loading import load_config
from maxbatch.runs.position import committed_steps
from maxbatch.system.errors import ConfigError, cannot_read
from maxbatch.training.array_files import arrays_handler, os_error, plain_path, reason, restore_as
from maxbatch.training.state import abstract_model


def load_parameters(path: str | Path) -> tuple[ConfigDict, nnx.GraphDef[Any], nnx.State]:
    """Returns the config and model graph of a run, and the parameters of its newest checkpoint, on the first device.

    Args:
      path: a run folder, or one of its `checkpoints/STEP`.

    Raises:
      ConfigError: there is no such run or checkpoint.
    """
    checkpoint = _find_checkpoint(path)
    config = load_config(checkpoint.parent.parent / "config.yml")
    graphdef, params = abstract_model(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params)
    return config, graphdef, restore_parameters(checkpoint, params)


def restore_parameters(path: str | Path, abstract_params: nnx.State) -> nnx.State:
    """Returns the parameters of a run folder or checkpoint, placed as `abstract_params` says.

    Raises:
      ConfigError: there is no such checkpoint, or its model has another shape.
    """
    checkpoint = _find_checkpoint(path)
    with plain_path(checkpoint) as folder, ocp.Checkpointer(arrays_handler()) as checkpointer:
        try:
            return checkpointer.restore(folder / "params", args=restore_as(abstract_params))
        except (OSError, ValueError, KeyError) as error:
            if failure := os_error(error):
                raise cannot_read(checkpoint, failure) from None
            raise ConfigError(
                f"load_parameters_path={path}: its parameters do not fit this model ({reason(error)})"
            ) from error


def _find_checkpoint(path: str | Path) -> Path:
    folder = Path(path).expanduser().absolute()
    if (folder / "params").is_dir():
        return folder
    for step in committed_steps(folder):
        if (folder / "checkpoints" / str(step) / "params").is_dir():
            return folder / "checkpoints" / str(step)
    raise ConfigError(f"{folder}: no checkpoint here; give a run folder with checkpoints/, or one of checkpoints/STEP")
