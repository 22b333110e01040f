"""The device mesh: axis sizes from the config, devices from JAX."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxbatch.config.combined import PlanConfig
from maxbatch.config.config import Config, as_plan
from maxbatch.plan.mesh_shape import MeshShape, check_model_fits

if TYPE_CHECKING:
    from ml_collections import ConfigDict


def slice_of(device: jax.Device) -> int:
    """Returns the number of a device's slice: TPU slices share a data-centre network; other devices
    are one slice.
    """
    return getattr(device, "slice_index", 0)


def num_slices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of slices that the devices span."""
    return len({slice_of(device) for device in devices})


def must_take_turns(devices: Sequence[jax.Device]) -> bool:
    """Returns whether a program on these devices must end before the next one begins.

    Of two programs in flight on CPU devices, each can hold threads that the other's collectives
    wait for.
    """
    return devices[0].platform == "cpu" and len(devices) > 1


def mesh_shape(config: PlanConfig, devices: Sequence[jax.Device]) -> MeshShape:
    """Returns the axis sizes of a run's mesh; a run builds them once and passes them on.

    Raises:
      ConfigError: the axes do not multiply to the devices, or one does not divide the model's
        dimension that it splits.
    """
    shape = MeshShape.from_config(config, len(devices), num_slices(devices))
    check_model_fits(config, shape)
    return shape


def share_out(
    devices: Sequence[jax.Device], num_first: int, num_last: int
) -> tuple[list[jax.Device], ...]:
    """Returns the first and the last devices of a share; every host and slice gives the same
    number.
    """
    hosts: dict[tuple[int, int], list[jax.Device]] = defaultdict(list)
    several = len({device.process_index for device in devices}) > 1
    for device in devices:
        hosts[(device.process_index, slice_of(device)) if several else (0, 0)].append(device)
    first, last = num_first // len(hosts), num_last // len(hosts)
    return [d for devices_of_host in hosts.values() for d in devices_of_host[:first]], [
        d for devices_of_host in hosts.values() for d in devices_of_host[-last:]
    ]


def lay_out(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """Returns the devices laid out over the axes; the compiler propagates shardings from the
    annotated arrays.

    On a TPU an axis covers whole dimensions of the torus where that works, and parts of some where
    it does not, such as 8 devices of 4x4x4. Devices that fill no box of the torus, such as half of
    each host's, stay in their order.
    """
    sizes, ici, dcn = (tuple(axes.values()) for axes in (shape.sizes, shape.ici, shape.dcn))
    if devices[0].platform == "tpu" and not _fill_a_box_each(devices):
        blocks = np.asarray(sorted(devices, key=slice_of)).reshape(*dcn, *ici)
        grid = blocks.transpose(
            [net + axis for axis in range(len(ici)) for net in (0, len(ici))]
        ).reshape(sizes)
    elif num_slices(devices) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=list(devices), allow_split_physical_axes=True
        )
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(sizes)
    else:
        grid = mesh_utils.create_device_mesh(
            sizes, devices=list(devices), allow_split_physical_axes=True
        )
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _fill_a_box_each(devices: Sequence[jax.Device]) -> bool:
    """Returns whether the devices of every slice fill a box of its torus."""
    cores: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for device in devices:
        cores[slice_of(device)].add((*device.coords, device.core_on_chip))
    return all(
        np.prod(np.ptp(np.array(list(cores_of_slice)), axis=0) + 1) == len(cores_of_slice)
        for cores_of_slice in cores.values()
    )


def lay_out_again(shape: MeshShape, mesh: Mesh) -> Mesh:
    """Returns the mesh's devices, in its order, over other axes, so that arrays move by exchanging
    pieces.
    """
    return Mesh(
        mesh.devices.reshape(tuple(shape.sizes.values())),
        tuple(shape.sizes),
        axis_types=mesh.axis_types,
    )


def make_mesh(config: Config | ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of a config: `mesh_shape`, laid out over the devices (by default all of
    them).
    """
    devices = jax.devices() if devices is None else devices
    return lay_out(mesh_shape(as_plan(config), devices), devices)
