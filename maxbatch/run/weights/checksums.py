"""Checksums of arrays, computed on their devices; equal for any sharding and number of devices and
hosts.

An array's checksum is the sum modulo 2^32 of a hash of each word and its index. A single changed
word always changes it; swapped words or another array go unnoticed once in 2^32 cases.
"""

from __future__ import annotations

import collections
import functools
import math
import zlib
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.hosts import warn
from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import KeyPath, State, Tree
from maxbatch.run.folder.position import CheckpointRecord, StoredParameter
from maxbatch.system.hashing import mixed
from maxbatch.system.storage.storage import AnyPath
from maxbatch.update.state import TrainState

# From the Fibonacci lattice, so that indices within a device's array do not collide in a pattern.
_AXIS, _PLACE = np.uint32(0x9E3779B1), np.uint32(0xCC9E2D51)
_MOST_READ = 1.1  # times the bytes of a tree
# of an array: its shape, dtype and sharding
Form: TypeAlias = tuple[tuple[int, ...], np.dtype, Sharding]


def array_checksums(arrays: Tree) -> np.ndarray:
    """Returns the checksum of every array of a tree, uint32[leaves]; all hosts of the mesh must
    call it.
    """
    return checksums_by(_program(_whole_on_all(arrays)), arrays)(arrays)


def lower_checksums(abstract: Tree) -> jax.stages.Lowered:
    """Lowers the checksum program for the shapes and shardings of a tree.

    It takes some arrays of each form, and runs several times over a tree. A compiler takes as long
    for each array of a program, and a state has many arrays of few forms.
    """
    leaves = jax.tree.leaves(abstract)
    first_run = [leaves[place] for place in _runs(abstract)[0]]
    lowered: jax.stages.Lowered = _program(_whole_on_all(abstract)).lower(first_run)
    return lowered


def checksums_by(
    program: Callable[[list[jax.Array]], jax.Array], abstract: Tree
) -> Callable[[Tree], np.ndarray]:
    """Returns the function of `array_checksums` that runs a program of `lower_checksums`, for trees
    of the same shapes and shardings.
    """
    runs = _runs(abstract)
    devices = {device for x in jax.tree.leaves(abstract) for device in x.sharding.device_set}
    takes_turns = must_take_turns(list(devices))

    def sums_of_run(arrays: list[jax.Array]) -> jax.Array:
        sums = program(arrays)
        return jax.block_until_ready(sums) if takes_turns else sums

    def sums_of(arrays: Tree) -> np.ndarray:
        leaves = jax.tree.leaves(arrays)
        sums_of_runs = [sums_of_run([leaves[place] for place in places]) for places in runs]
        sums = np.zeros(len(leaves), np.uint32)
        for places, of_run in zip(runs, jax.device_get(sums_of_runs), strict=True):
            sums[places] = of_run
        return sums

    return sums_of


def combined(sums: np.ndarray) -> int:
    """Combines the checksums of many arrays into one of 32 bits."""
    return zlib.crc32(np.asarray(sums).astype("<u4").tobytes())


def stored_parameters(params: State, sums: np.ndarray) -> dict[str, StoredParameter]:
    """Returns the facts of parameters for a checkpoint's JSON, by name; `sums` begins with their
    checksums.
    """
    leaves = jax.tree.leaves_with_path(params)
    return {
        parameter_name(path): StoredParameter(tuple(leaf.shape), str(leaf.dtype), int(checksum))
        for (path, leaf), checksum in zip(leaves, sums, strict=False)
    }


def damage_of_parameters(
    stored: dict[str, StoredParameter], params: State, sums: np.ndarray
) -> str | None:
    """Compares some or all of a checkpoint's parameters with its JSON; returns the difference, or
    None.
    """
    names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    differing = [
        name
        for name, checksum in zip(names, sums, strict=False)
        if name not in stored or stored[name].checksum != int(checksum)
    ]
    return f"{differing[0]} does not match its checksum" if differing else None


def damage_of_state(
    record: CheckpointRecord, state: TrainState, sums_of: Callable[[TrainState], np.ndarray]
) -> str | None:
    """Compares restored parameters and optimizer state with their checkpoint's JSON; returns the
    difference or None.

    A checkpoint made without checksums of parameters has only those of its blocks.
    """
    if record.parameters is None:
        return None
    sums = sums_of(state)
    if damage := damage_of_parameters(record.parameters, state.params, sums):
        return damage
    return (
        None
        if combined(sums) == record.checksum
        else "the optimizer's state does not match its checksum"
    )


@functools.cache
def warn_of_no_checksums(checkpoint: AnyPath) -> None:
    """Warns, once, of a checkpoint without checksums of its parameters."""
    warn(f"{checkpoint}: was made before parameters had checksums; they are not checked")


def parameter_name(path: KeyPath) -> str:
    """Returns the name of a parameter in a checkpoint's JSON and in messages."""
    return ".".join(parameter_path(path))


@functools.cache
def _program(place: Sharding) -> jax.stages.Wrapped:
    def sums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_checksum(x) for x in arrays])

    return jax.jit(sums, out_shardings=place)


def _runs(arrays: Tree) -> list[list[int]]:
    """Returns the places of the arrays of each run of the checksum program, the same number of each
    form.

    There are as many runs as read few bytes twice: an array of a rare form is in several.
    """
    forms: dict[Form, list[int]] = collections.defaultdict(list)
    leaves = jax.tree.leaves(arrays)
    for place, x in enumerate(leaves):
        forms[x.shape, x.dtype, x.sharding].append(place)

    def bytes_read(num_runs: int) -> int:
        return sum(
            num_runs * math.ceil(len(places) / num_runs) * math.prod(shape) * dtype.itemsize
            for (shape, dtype, _), places in forms.items()
        )

    most = _MOST_READ * bytes_read(1)
    num_runs = max(n for n in range(1, len(leaves) + 1) if n == 1 or bytes_read(n) <= most)

    def of_run(run: int, places: list[int]) -> list[int]:
        size = math.ceil(len(places) / num_runs)
        return [places[min(run * size + i, len(places) - 1)] for i in range(size)]

    return [
        [place for places in forms.values() for place in of_run(run, places)]
        for run in range(num_runs)
    ]


def _whole_on_all(arrays: Tree) -> Sharding:
    sharding: Sharding = jax.tree.leaves(arrays)[0].sharding
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding


def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        place = place * _AXIS + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return mixed(words ^ (place * _PLACE)).sum(dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
