"""Checksums of arrays, computed on their devices; equal for any sharding and number of devices and
hosts.

An array's checksum is the sum modulo 2^32 of a hash of each word and its index. A single changed
word always changes it; swapped words or another array go unnoticed once in 2^32 cases.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import KeyPath, State, Tree
from maxbatch.runs.position import CheckpointRecord, StoredParameter
from maxbatch.system.hashing import mixed
from maxbatch.training.update.state import TrainState

# From the Fibonacci lattice, so that indices within a device's array do not collide in a pattern.
_AXIS, _PLACE = np.uint32(0x9E3779B1), np.uint32(0xCC9E2D51)


def array_checksums(arrays: Tree) -> np.ndarray:
    """Returns the checksum of every array of a tree, uint32[leaves]; all hosts of the mesh must
    call it.
    """
    sums: np.ndarray = jax.device_get(_program(_whole_on_all(arrays))(arrays))
    return sums


def lower_checksums(abstract: Tree) -> jax.stages.Lowered:
    """Lowers the checksum program for the shapes and shardings of a tree."""
    lowered: jax.stages.Lowered = _program(_whole_on_all(abstract)).lower(abstract)
    return lowered


def combined(sums: np.ndarray) -> int:
    """Combines the checksums of many arrays into one of 32 bits."""
    return zlib.crc32(np.asarray(sums).astype("<u4").tobytes())


@jax.jit
def word_sum(arrays: Tree) -> jax.Array:
    """Returns the uint32 sum of all words regardless of position, the checksum of older
    checkpoints.
    """
    return jnp.stack([_words(leaf).sum(dtype=jnp.uint32) for leaf in jax.tree.leaves(arrays)]).sum(
        dtype=jnp.uint32
    )


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
        for name, found in zip(names, sums, strict=False)
        if name not in stored or stored[name].checksum != int(found)
    ]
    return f"{differing[0]} does not match its checksum" if differing else None


def damage_of_state(
    record: CheckpointRecord, state: TrainState, sums_of: Callable[[TrainState], np.ndarray]
) -> str | None:
    """Compares restored parameters and optimizer state with their checkpoint's JSON; returns the
    difference or None.
    """
    if record.parameters is None:
        return (
            None
            if int(word_sum(state)) == record.checksum
            else "its arrays do not match their checksum"
        )
    sums = sums_of(state)
    if damage := damage_of_parameters(record.parameters, state.params, sums):
        return damage
    return (
        None
        if combined(sums) == record.checksum
        else "the optimizer's state does not match its checksum"
    )


def parameter_name(path: KeyPath) -> str:
    """Returns the name of a parameter in a checkpoint's JSON and in messages."""
    return ".".join(parameter_path(path))


@functools.cache
def _program(place: Sharding) -> jax.stages.Wrapped:
    def sums(arrays: Tree) -> jax.Array:
        return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(arrays)])

    return jax.jit(sums, out_shardings=place)


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
