"""The device mesh: axis sizes from the config, devices from JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from maxbatch.plan.mesh_shape import MeshShape, check_model_fits


def num_slices(devices: Sequence[jax.Device]) -> int:
    """Slices that the devices span: TPU slices joined by a data-centre network, else 1."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def must_take_turns(devices: Sequence[jax.Device]) -> bool:
    """Whether a program on these devices must end before the next one begins.

    Of two in flight on CPU devices, each can hold the threads that the other's collectives wait for.
    """
    return devices[0].platform == "cpu" and len(devices) > 1


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays the devices out over the axes data, fsdp, tensor, context and pipeline.

    Args:
      config: the run's config; its `ici_*` and `dcn_*` keys give the axis sizes.
      devices: the devices to use, all of the run's by default.

    Returns:
      A mesh of `AxisType.Auto` axes: the compiler propagates shardings from the annotated arrays.

    Raises:
      ConfigError: the axes do not multiply out to the devices, or one does not divide what it splits of the model.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = num_slices(devices)
    shape = MeshShape.from_config(config, len(devices), slices)
    check_model_fits(config, shape)
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            tuple(shape.ici.values()), tuple(shape.dcn.values()), devices=devices
        )
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(tuple(shape.sizes.values()))
    else:
        grid = mesh_utils.create_device_mesh(tuple(shape.sizes.values()), devices=devices)
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * len(shape.sizes))
