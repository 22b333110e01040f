"""Where the activations of a program lie, and on what: the one thing the model knows of its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LogicalAxes = tuple[str | None, ...]


def _whole(shape: tuple[int, ...], logical_axes: LogicalAxes) -> P:
    del logical_axes
    return P(*(None for _ in shape))


@dataclasses.dataclass(frozen=True)
class Constrain:
    """Pins activations to the mesh by the names of their dimensions; without a mesh, leaves them to the compiler.

    Attributes:
      mesh: the devices that the program is compiled for, perhaps of a machine that is not here; None: the default one.
      spec: the partition of an array, of its shape and its logical axes. Under `jax.vmap` the mapped axis is in
        neither.
    """

    mesh: Mesh | None = None
    spec: Callable[[tuple[int, ...], LogicalAxes], P] = _whole

    def __call__(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        """Return x, placed."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(x.shape, logical_axes)))

    @property
    def platform(self) -> str:
        """Return the kind of the devices: "cpu", "gpu" or "tpu"."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform


unconstrained = Constrain()
