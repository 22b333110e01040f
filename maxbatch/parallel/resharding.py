"""Parameters on another mesh, without a whole copy on any device.

Left to itself, the compiler may gather an array whole and cut it anew. Here an array goes through
placements that each differ in one way, which the compiler turns into an exchange of pieces: all
mesh axes split one dimension, the new axes split it in the place of the old ones, and what the new
placement repeats is gathered last.

On the way to other devices the pieces are copied while one dimension is split evenly. Every host
has devices of both meshes and holds the same block of that dimension on either, so a copy stays
within a host. It goes from device to device where a host has as many of either, else through the
host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import State

_Axes = tuple[str, ...]  # mesh axes that split a dimension
_DEVICES = "devices"  # the only axis of a mesh that is a list of devices


class _Even(NamedTuple):
    """The form of an array on its way to other devices."""

    shape: tuple[int, ...]
    dim: int | None  # split evenly over all devices; None: the array has no dimensions
    padding: int  # zeros after that dimension, so that both numbers of devices divide it


class HandedOver(NamedTuple):
    """Parameters that `Resharding.receive` takes, on the devices of the new mesh."""

    params: State | None  # that are on these devices, at other shardings perhaps
    pieces: Sequence[jax.Array] = ()  # of other parameters: each array split evenly
    forms: tuple[_Even, ...] = ()  # of the pieces


class Resharding:
    """Moves parameters to `shardings`, in the tree of the parameters; all are of one mesh.

    Parameters on its devices, in their order, are exchanged by one program for all arrays. Those on
    other devices are split evenly by one program, copied, and put together by another. Every host
    must have the same number of devices of each mesh.
    """

    def __init__(self, shardings: State) -> None:
        self._shardings = shardings
        self._exchange = jax.jit(self._exchanged, static_argnums=1, out_shardings=shardings)
        self._split = jax.jit(_split_evenly, static_argnums=(1, 2))
        self._join = jax.jit(self._joined, static_argnums=1, out_shardings=shardings)

    def __call__(self, params: State) -> State:
        """Returns the parameters there; the same arrays if they are there already."""
        return self.receive(self.hand_over(params))

    def hand_over(self, params: State) -> HandedOver:
        """Copies the parameters to the devices of the new mesh if they are on others.

        It runs programs of the old mesh only, and `receive` of the new one only. So they may be
        called in two threads: the programs of a mesh are in the same order on all hosts.
        """
        old, new = (tuple(jax.tree.leaves(tree)) for tree in (params, self._shardings))
        sources = tuple(array.sharding for array in old)
        old_mesh, new_mesh = sources[0].mesh, new[0].mesh
        if _devices(old_mesh) == _devices(new_mesh):
            return HandedOver(params)
        unit = math.lcm(old_mesh.size, new_mesh.size)
        forms = tuple(
            _form(array.shape, target, unit) for array, target in zip(old, new, strict=True)
        )
        split = self._split(old, sources, forms)
        _wait_on_cpu(old_mesh, split)
        return HandedOver(None, _copied(split, forms, old_mesh, new_mesh), forms)

    def receive(self, handed: HandedOver) -> State:
        """Returns parameters that were handed over, at their shardings."""
        new = tuple(jax.tree.leaves(self._shardings))
        new_mesh: Mesh = new[0].mesh
        if handed.params is None:
            placements = [_evenly(new_mesh, form) for form in handed.forms]
            received: State = self._join(jax.device_put(handed.pieces, placements), handed.forms)
        else:
            sources = tuple(array.sharding for array in jax.tree.leaves(handed.params))
            if sources == new:
                return handed.params
            received = self._exchange(handed.params, sources)
        _wait_on_cpu(new_mesh, received)
        return received

    def _exchanged(self, params: State, sources: Sequence[NamedSharding]) -> State:
        arrays, tree = jax.tree.flatten(params)
        moved = []
        for array, source, target in zip(
            arrays, sources, jax.tree.leaves(self._shardings), strict=True
        ):
            for placement in steps(array.shape, source, target):
                array = jax.lax.with_sharding_constraint(array, placement)
            moved.append(array)
        state: State = jax.tree.unflatten(tree, moved)
        return state

    def _joined(self, pieces: Sequence[jax.Array], forms: Sequence[_Even]) -> State:
        targets, tree = jax.tree.flatten(self._shardings)
        joined = []
        for array, target, form in zip(pieces, targets, forms, strict=True):
            if form.dim is not None:
                for placement in _steps_from_even(array.ndim, form.dim, target):
                    array = jax.lax.with_sharding_constraint(array, placement)
                array = jax.lax.slice_in_dim(array, 0, form.shape[form.dim], axis=form.dim)
            joined.append(array)
        state: State = jax.tree.unflatten(tree, joined)
        return state


def steps(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> Iterator[NamedSharding]:
    """Yields the placements of an array between two meshes of the same devices.

    There are none where no dimension can be split by all devices.
    """
    dims = [dim for dim, size in enumerate(shape) if size % source.mesh.size == 0]
    if source.mesh.size > 1 and dims:
        dim = _best(shape, dims, target)
        yield from _steps_to_even(len(shape), dim, source)
        yield from _steps_from_even(len(shape), dim, target)


def _best(shape: tuple[int, ...], dims: Sequence[int], target: NamedSharding) -> int:
    """Returns the dimension that all devices split for a while: one that the new placement splits,
    else the largest.
    """
    new = _axes_of(target, len(shape))
    return max(dims, key=lambda dim: (bool(new[dim]), shape[dim]))


def _steps_to_even(num_dims: int, dim: int, source: NamedSharding) -> Iterator[NamedSharding]:
    """Yields the placements until all axes of the mesh split that dimension."""
    mesh, old = _mesh(source), _axes_of(source, num_dims)
    old[dim] += _others(mesh, old)
    yield _placement(mesh, old)
    for i in range(num_dims):
        while i != dim and old[i]:
            old[i], moved = old[i][:-1], old[i][-1:]
            old[dim] += moved
            yield _placement(mesh, old)


def _steps_from_even(num_dims: int, dim: int, target: NamedSharding) -> Iterator[NamedSharding]:
    """Yields the placements from one where all axes of the mesh split that dimension."""
    mesh, new = _mesh(target), _axes_of(target, num_dims)
    elsewhere = tuple(axis for i, axes in enumerate(new) if i != dim for axis in axes)
    now: list[_Axes] = [() for _ in new]
    now[dim] = new[dim] + _others(mesh, new) + elsewhere
    yield _placement(mesh, now)
    for i in range(num_dims):
        for axis in new[i] if i != dim else ():
            now[dim] = tuple(other for other in now[dim] if other != axis)
            now[i] += (axis,)
            yield _placement(mesh, now)


def _form(shape: tuple[int, ...], target: NamedSharding, unit: int) -> _Even:
    """Returns the form of an array that is split into `unit` parts, or into a number that divides
    it.
    """
    dims = [dim for dim, size in enumerate(shape) if size % unit == 0] or range(len(shape))
    dim = _best(shape, dims, target) if dims else None
    return _Even(shape, dim, 0 if dim is None else -shape[dim] % unit)


def _split_evenly(
    arrays: Sequence[jax.Array], sources: Sequence[NamedSharding], forms: Sequence[_Even]
) -> list[jax.Array]:
    split = []
    for array, source, form in zip(arrays, sources, forms, strict=True):
        if form.dim is not None:
            array = jnp.pad(
                array, [(0, form.padding if dim == form.dim else 0) for dim in range(array.ndim)]
            )
            for placement in _steps_to_even(array.ndim, form.dim, source):
                array = jax.lax.with_sharding_constraint(array, placement)
        split.append(jax.lax.with_sharding_constraint(array, _evenly(_mesh(source), form)))
    return split


def _copied(
    arrays: Sequence[jax.Array], forms: Sequence[_Even], old_mesh: Mesh, new_mesh: Mesh
) -> list[jax.Array]:
    """Returns evenly split arrays on the devices of another mesh; each host copies the block that
    it holds.
    """
    old_mesh, new_mesh = _by_host(old_mesh), _by_host(new_mesh)
    old_own, new_own = _of_this_host(old_mesh), _of_this_host(new_mesh)
    num_hosts = new_mesh.size // new_own.size
    arrays = jax.device_put(arrays, [_evenly(old_mesh, form) for form in forms])
    blocks = []
    for array, form in zip(arrays, forms, strict=True):
        shape = tuple(
            size // num_hosts if dim == form.dim else size for dim, size in enumerate(array.shape)
        )
        blocks.append(_from_pieces(shape, _evenly(old_own, form), array))
    blocks = jax.device_put(blocks, [_evenly(new_own, form) for form in forms])
    return [
        _from_pieces(array.shape, _evenly(new_mesh, form), block)
        for array, block, form in zip(arrays, blocks, forms, strict=True)
    ]


def _from_pieces(shape: tuple[int, ...], sharding: NamedSharding, array: jax.Array) -> jax.Array:
    """Returns the pieces that an array has on this host as those of an array of another shape."""
    pieces = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _by_host(mesh: Mesh) -> Mesh:
    """Returns a mesh of one axis if the devices of a host are not next to each other; else the
    mesh.
    """
    devices = _devices(mesh)
    ordered = sorted(devices, key=lambda device: device.process_index)
    return mesh if ordered == devices else Mesh(np.asarray(ordered), (_DEVICES,))


def _of_this_host(mesh: Mesh) -> Mesh:
    devices = [device for device in _devices(mesh) if device.process_index == jax.process_index()]
    return Mesh(np.asarray(devices), (_DEVICES,))


def _evenly(mesh: Mesh, form: _Even) -> NamedSharding:
    """Returns the placement of an array that all devices split along a dimension, in the order of
    the mesh.
    """
    return NamedSharding(mesh, P() if form.dim is None else P(*[None] * form.dim, mesh.axis_names))


def _wait_on_cpu(mesh: Mesh, arrays: object) -> None:
    if must_take_turns(_devices(mesh)):
        jax.block_until_ready(arrays)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh), "the devices are here"
    return sharding.mesh


def _devices(mesh: Mesh) -> list[jax.Device]:
    devices: list[jax.Device] = mesh.devices.flatten().tolist()
    return devices


def _axes_of(sharding: NamedSharding, num_dims: int) -> list[_Axes]:
    """Returns the mesh axes of more than one device that split each dimension."""
    axes_of_dimensions = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    named = [
        tuple(axis for axis in axes if axis and sharding.mesh.shape[axis] > 1)
        for axes in axes_of_dimensions
    ]
    return named + [()] * (num_dims - len(named))


def _others(mesh: Mesh, used: Sequence[_Axes]) -> _Axes:
    """Returns the mesh axes of more than one device that split no dimension."""
    used_axes = {axis for axes in used for axis in axes}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used_axes)


def _placement(mesh: Mesh, axes: Sequence[_Axes]) -> NamedSharding:
    return NamedSharding(mesh, P(*(part or None for part in axes)))
