"""Parameters on another mesh of the same devices, without a whole copy on any of them.

Left to itself, the compiler may gather an array whole and cut it anew. Here an array goes through placements that each
differ in one way, which the compiler turns into an exchange of pieces: all mesh axes split one dimension, the new
axes split it in the place of the old ones, and what the new placement repeats is gathered last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import State

_Axes = tuple[str, ...]  # mesh axes that split a dimension


class Resharding:
    """Moves parameters to `shardings`, in the tree of the parameters.

    Arrays on the same devices in the same order are exchanged in pieces, by one program for all of them. Those on
    others are copied there.
    """

    def __init__(self, shardings: State) -> None:
        self._shardings = shardings
        self._exchange = jax.jit(self._exchanged, static_argnums=1, out_shardings=shardings)

    def __call__(self, params: State) -> State:
        """Returns the parameters there; the same arrays if they are there already."""
        old, new = (tuple(jax.tree.leaves(tree)) for tree in (params, self._shardings))
        sources = tuple(array.sharding for array in old)
        if sources == new or not all(map(_are_on_the_same_devices, sources, new)):
            moved: State = jax.device_put(params, self._shardings)
            return moved
        exchanged: State = self._exchange(params, sources)
        if must_take_turns(new[0].mesh.devices.flatten().tolist()):
            jax.block_until_ready(exchanged)
        return exchanged

    def _exchanged(self, params: State, sources: Sequence[NamedSharding]) -> State:
        arrays, tree = jax.tree.flatten(params)
        moved = []
        for array, source, target in zip(arrays, sources, jax.tree.leaves(self._shardings), strict=True):
            for placement in steps(array.shape, source, target):
                array = jax.lax.with_sharding_constraint(array, placement)
            moved.append(array)
        state: State = jax.tree.unflatten(tree, moved)
        return state


def steps(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> Iterator[NamedSharding]:
    """Yields the placements of an array between two meshes of the same devices.

    There are none where no dimension can be split by all devices.
    """
    old_mesh, new_mesh = source.mesh, target.mesh
    assert isinstance(old_mesh, Mesh) and isinstance(new_mesh, Mesh), "the devices are here"
    old, new = _axes_of(source, len(shape)), _axes_of(target, len(shape))
    devices = old_mesh.size
    # The dimension that all devices split for a while: one that the new placement splits, else the largest.
    dims = [dim for dim in range(len(shape)) if shape[dim] % devices == 0]
    if devices == 1 or not dims:
        return
    dim = max(dims, key=lambda i: (bool(new[i]), shape[i]))
    old[dim] += _others(old_mesh, old)
    yield _placement(old_mesh, old)
    for i in range(len(shape)):
        while i != dim and old[i]:
            old[i], moved = old[i][:-1], old[i][-1:]
            old[dim] += moved
            yield _placement(old_mesh, old)
    repeated = _others(new_mesh, new)
    elsewhere = tuple(axis for i, axes in enumerate(new) if i != dim for axis in axes)
    now: list[_Axes] = [() for _ in shape]
    now[dim] = new[dim] + repeated + elsewhere
    yield _placement(new_mesh, now)
    for i in range(len(shape)):
        for axis in new[i] if i != dim else ():
            now[dim] = tuple(other for other in now[dim] if other != axis)
            now[i] += (axis,)
            yield _placement(new_mesh, now)


def _are_on_the_same_devices(source: jax.sharding.Sharding, target: NamedSharding) -> bool:
    return isinstance(source, NamedSharding) and source.mesh.devices.flatten().tolist() == (
        target.mesh.devices.flatten().tolist()
    )


def _axes_of(sharding: NamedSharding, num_dims: int) -> list[_Axes]:
    """Returns the mesh axes of more than one device that split each dimension."""
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec]
    named = [tuple(axis for axis in part if axis and sharding.mesh.shape[axis] > 1) for part in parts]
    return named + [()] * (num_dims - len(named))


def _others(mesh: Mesh, used: Sequence[_Axes]) -> _Axes:
    """Returns the mesh axes of more than one device that split no dimension."""
    taken = {axis for axes in used for axis in axes}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in taken)


def _placement(mesh: Mesh, axes: Sequence[_Axes]) -> NamedSharding:
    return NamedSharding(mesh, P(*(part or None for part in axes)))
