"""Hashes of a state's arrays, to the last bit, of every copy on every device.

Element i of an array in row-major order, with the bits b as a whole number, has two lanes of 32
bits, x = 0 and 1, by `mixed` (MurmurHash3's finaliser) and the constants of
`maxbatch.system.hashing`:

    mixed(mixed(i * POSITION + LANES[x]) ^ (b * TOKEN))

The hash of an array is the sum of its elements' lanes, each modulo 2^32. The hash of a state is the
sum over its arrays of mixed(lane ^ lane of the name), where the name's lanes are the first 8 bytes
of its SHA-256. As text a hash is lane 1, then lane 0, of 8 hex digits each. docs/to-the-bit.md has a
script that computes both from a checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.system.errors import TrainingError
from maxbatch.system.hashing import LANES, POSITION, TOKEN, mixed
from maxbatch.update.reproducible.slabs import Slabs
from maxbatch.update.state import TrainState


class StateHashes(NamedTuple):
    """The hashes of a state after an update, 16 hex digits each."""

    of_state: str
    of_arrays: Mapping[str, str]  # by name, as in the indices of a checkpoint


class StateHasher:
    """The program that hashes each device's part of every array of a state, and its reader."""

    def __init__(self, abstract: TrainState, mesh: Mesh) -> None:
        self._mesh, self._arrays = mesh, named_arrays(abstract)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program: arrays -> uint32[devices, arrays, lanes], whole on every device."""
        axes = self._mesh.axis_names
        shardings: list[Any] = [x.sharding for x in self._arrays.values()]
        specs = [sharding.spec for sharding in shardings]

        def of_device(arrays: list[jax.Array]) -> jax.Array:
            lanes = [
                _lanes(part, x.shape, _first_index(self._mesh, spec, part.shape))
                for part, x, spec in zip(arrays, self._arrays.values(), specs, strict=True)
            ]
            return jnp.stack(lanes)[None]

        hashed = jax.shard_map(
            of_device, mesh=self._mesh, in_specs=(specs,), out_specs=P(axes), check_vma=False
        )
        whole = NamedSharding(self._mesh, P())
        lowered: jax.stages.Lowered = jax.jit(hashed, out_shardings=whole).lower(
            list(self._arrays.values())
        )
        return lowered

    def read(self, lanes_NxAx2: np.ndarray, step: int) -> StateHashes:
        """Returns the hashes of a state after `step` updates from the program's result.

        Raises:
          TrainingError: copies of an array differ; names host, device and array.
        """
        sums, of_state = {}, np.zeros(2, np.uint32)
        devices = list(self._mesh.devices.flat)
        for place, (name, x) in enumerate(self._arrays.items()):
            parts: dict[tuple[tuple[int, int, int], ...], tuple[jax.Device, np.ndarray]] = {}
            indices = x.sharding.devices_indices_map(x.shape)
            for device, lanes in zip(devices, lanes_NxAx2[:, place], strict=True):
                index = indices[device]
                bounds = tuple(s.indices(n) for s, n in zip(index, x.shape, strict=True))
                first, expected = parts.setdefault(bounds, (device, lanes))
                if (lanes != expected).any():
                    raise TrainingError(
                        f"update {step}: {name} of device {device.id} on host "
                        f"{device.process_index} differs from its copy on device {first.id} of "
                        f"host {first.process_index}; one of them computed or stored it wrongly. "
                        "Go on from the last checkpoint, on other devices if it happens again"
                    )
            lanes = np.sum([lanes for _, lanes in parts.values()], axis=0, dtype=np.uint32)
            sums[name] = _text(lanes)
            of_state += mixed(lanes ^ _name_lanes(name))
        return StateHashes(_text(of_state), sums)


def named_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Returns the arrays of a state that checkpoints have, by item and name in its index."""
    return {
        f"{item}{jax.tree_util.keystr(path)}": leaf
        for item, tree in state.saved._asdict().items()
        if tree is not None
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _first_index(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> list[jax.Array | int]:
    """Returns the index in the whole array of a device's first element, inside of `shard_map`."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    return [
        jax.lax.axis_index(axis).astype(jnp.uint32) * size if axis else 0
        for axis, size in zip(axes, shape, strict=True)
    ]


def _lanes(part: jax.Array, shape: tuple[int, ...], first: list[jax.Array | int]) -> jax.Array:
    """Returns the sums of the lanes of a part of an array, uint32[2]."""
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[part.dtype.itemsize]
    slabs = Slabs.of(part.shape)
    matrix, last = slabs.as_matrix(part), first[-1] if first else 0

    def add_slab(number: jax.Array, sums: jax.Array) -> jax.Array:
        first_row = slabs.first_row(number)
        slab = slabs.rows_at(matrix, first_row)
        bits = jax.lax.bitcast_convert_type(slab, word).astype(jnp.uint32)
        rest = jnp.arange(slabs.rows, dtype=jnp.uint32) + first_row.astype(jnp.uint32)
        index = jnp.arange(slabs.num_columns, dtype=jnp.uint32)[None] + last
        for axis in reversed(range(len(shape) - 1)):
            place, rest = rest % part.shape[axis], rest // part.shape[axis]
            stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
            index += ((place + first[axis]) * stride)[:, None]
        lanes = [mixed(mixed(index * POSITION + lane) ^ (bits * TOKEN)) for lane in LANES]
        lanes = [jnp.sum(slabs.only_new(number, lane), dtype=jnp.uint32) for lane in lanes]
        return sums + jnp.stack(lanes)

    return slabs.fold(add_slab, jnp.zeros(2, jnp.uint32))


@functools.cache
def _name_lanes(name: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], "<u4")


def _text(lanes: np.ndarray) -> str:
    return f"{lanes[1]:08x}{lanes[0]:08x}"
