"""First parameters whose bits do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from maxbatch.parallel.trees import State
from maxbatch.update.reproducible.programs import MakeExecutables


def made_whole(
    mesh: Mesh,
    name: str,
    make: Callable[[jax.Array], State],
    abstract: State,
    seed: int,
    executables: MakeExecutables,
) -> Callable[[], State]:
    """Compiles a program that one device of each host runs; returns the function that makes its
    result and places the shards.

    Args:
      name: of the program.
      make: makes parameters from a seed, inside of the program.
      abstract: the shapes and shardings of the parameters.
    """
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    jitted = jax.jit(make, out_shardings=SingleDeviceSharding(device))
    number = np.uint32(seed)
    program = executables(name, lambda: jitted.lower(number), [device])[device]

    def sharded(abstract: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
        values = np.asarray(x)
        return jax.make_array_from_callback(x.shape, abstract.sharding, values.__getitem__)

    def made() -> State:
        state: State = jax.tree.map(sharded, abstract, program(number))
        return state

    return made
