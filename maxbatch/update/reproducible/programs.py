"""The two sorts of programs of a reproducible update: for one device, which round, and on the mesh,
which add without rounding and move numbers.

Shapes: N devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.mesh import must_take_turns
from maxbatch.plan.mesh_shape import AXES

T = TypeVar("T")
# (name, function that lowers a program) -> the compiled program
MakeExecutable = Callable[[str, Callable[[], jax.stages.Lowered]], jax.stages.Compiled]

# (name, function that lowers a program for the first device, devices) -> the program on each
MakeExecutables = Callable[
    [str, Callable[[], jax.stages.Lowered], Sequence[jax.Device]],
    dict[jax.Device, jax.stages.Compiled],
]
OnDevices = dict[jax.Device, jax.stages.Compiled]


class DevicePrograms:
    """Compiles programs on a mesh and on its devices, and moves arrays between them.

    Args:
      executable: compiles a program.
      executables: compiles a program for the first of some devices, and loads it on all.

    Attributes:
      devices: those of this host.
      names: of the compiled programs.
      whole: sharding of arrays that are whole on every device.
      split: sharding of arrays [N, ...] with a part on each device.
    """

    def __init__(
        self, mesh: Mesh, executable: MakeExecutable, executables: MakeExecutables
    ) -> None:
        self.mesh, self._executable, self._executables = mesh, executable, executables
        self.names: list[str] = []
        self._takes_turns = must_take_turns(list(mesh.devices.flat))
        self.devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self.whole = NamedSharding(mesh, P())
        self.split = NamedSharding(mesh, P(mesh.axis_names))

    def on_mesh(
        self, name: str, function: Callable[..., Any], *arguments: Any, out: Any
    ) -> jax.stages.Compiled:
        """Compiles a program on the mesh for the forms of its arguments.

        Args:
          out: shardings of its results, so that the program can be loaded elsewhere.
        """
        jitted = jax.jit(function, out_shardings=out)
        return self.lowered_on_mesh(name, lambda: jitted.lower(*arguments))

    def lowered_on_mesh(
        self, name: str, lower: Callable[[], jax.stages.Lowered]
    ) -> jax.stages.Compiled:
        """Compiles a program on the mesh that `lower` lowers."""
        self.names.append(name)
        return self._executable(name, lower)

    def on_devices(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        only_first: bool = False,
        donated: tuple[int, ...] = (),
    ) -> OnDevices:
        """Compiles a program for this host's first device alone, and loads it on the others."""
        first = self.devices[0]
        place = SingleDeviceSharding(first)
        jitted = jax.jit(function, out_shardings=place, donate_argnums=donated)
        forms = jax.tree.map(lambda x: form(x.shape, x.dtype, place), arguments)
        devices = self.devices[:1] if only_first else self.devices
        self.names.append(name)
        return self._executables(name, lambda: jitted.lower(*forms), devices)

    def run(self, program: jax.stages.Compiled, *arguments: Any) -> Any:
        """Runs a program on the mesh."""
        result = program(*arguments)
        return jax.block_until_ready(result) if self._takes_turns else result

    def of_devices(self, trees: list[T]) -> T:
        """Returns arrays [N, ...] of arrays [1, ...] on each of this host's devices."""

        def joined(*parts: jax.Array) -> jax.Array:
            shape = (self.mesh.size, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self.split, parts)

        tree: T = jax.tree.map(joined, *trees)
        return tree

    def everywhere(self, tree: T) -> T:
        """Returns arrays whole on every device, from this host's first device."""

        def copied(x: jax.Array) -> jax.Array:
            copies = [jax.device_put(x, SingleDeviceSharding(d)) for d in self.devices]
            return jax.make_array_from_single_device_arrays(x.shape, self.whole, copies)

        copies: T = jax.tree.map(copied, tree)
        return copies


def mesh_of(device: jax.Device) -> Mesh:
    """Returns the mesh of one device alone, for programs that every layout shares."""
    devices = np.array(device).reshape((1,) * len(AXES))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def form(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """Returns the form of an array, to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def on(device: jax.Device, tree: T) -> T:
    """Returns a device's parts of arrays."""

    def part(x: jax.Array) -> Any:
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    parts: T = jax.tree.map(part, tree)
    return parts


def free(tree: Any) -> None:
    """Gives up the memory of arrays, as donation does, once programs under way have read them."""
    for x in jax.tree.leaves(tree):
        x.delete()
