"""A stored array onto the devices of several hosts, each of which reads a share of the chunks.

The chunks of a checkpoint follow the mesh that wrote it. So every host reads whole chunks, each
chunk one host, and all hosts exchange them in pieces: a piece of every host goes to all devices,
and each device keeps the part that it holds. What a device holds beside the array is the pieces of
one round.

Shapes: N devices, H hosts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.huggingface.arrays.reading import zeros_of
from maxbatch.maxtext.checkpoints.stored import Spans, StoredArray
from maxbatch.parallel.hosts import gather
from maxbatch.system.errors import ConfigError

_ROUND_BYTES = 64 << 20  # pieces of all hosts that are exchanged at a time


def read_whole(array: StoredArray) -> np.ndarray:
    """Returns a stored array in host memory; each of its chunks is read once.

    Raises:
      ConfigError: a chunk is damaged or cannot be read.
    """
    chunks = array.chunks
    if len(chunks) == 1:
        return array.read(chunks[0])
    whole = np.empty(array.shape, array.dtype)

    def read(chunk: Spans) -> None:
        whole[tuple(slice(*span) for span in chunk)] = array.read(chunk)

    with ThreadPoolExecutor() as threads:
        list(threads.map(read, chunks))
    return whole


def read_shared(array: StoredArray, sharding: NamedSharding) -> jax.Array:
    """Returns a stored array on the devices of several hosts, which all call this for the same
    arrays in one order.

    Raises:
      ConfigError: a chunk is damaged or cannot be read, on any host.
    """
    host, num_hosts = jax.process_index(), jax.process_count()
    by_shape: dict[tuple[int, ...], list[Spans]] = defaultdict(list)
    for chunk in array.chunks:
        by_shape[tuple(end - begin for begin, end in chunk)].append(chunk)

    whole = zeros_of(
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    ).block_until_ready()
    for chunk_shape, chunks in by_shape.items():
        piece_shape = _piece_shape(chunk_shape, _ROUND_BYTES // num_hosts // array.dtype.itemsize)
        write = _writer(array, sharding, piece_shape)
        starts = _piece_starts(chunk_shape, piece_shape)
        for first in range(0, len(chunks), num_hosts):
            of_round = chunks[first : first + num_hosts]
            values = _read_checked(array, of_round[host] if host < len(of_round) else None)
            for start in starts:
                piece = None
                if values is not None:
                    piece = values[
                        tuple(
                            slice(a, a + side) for a, side in zip(start, piece_shape, strict=True)
                        )
                    ]
                # A host without a chunk sends a piece that lies outside of the array.
                outside = tuple(-side for side in piece_shape)
                places = [
                    tuple(span[0] + a for span, a in zip(of_round[other], start, strict=True))
                    if other < len(of_round)
                    else outside
                    for other in range(num_hosts)
                ]
                # Of two programs in flight on CPU devices, each can hold threads that the other
                # waits for.
                whole = write(whole, piece, places).block_until_ready()
    return whole


def _read_checked(array: StoredArray, chunk: Spans | None) -> np.ndarray | None:
    """Reads a chunk; an error on one host is raised on all, which would otherwise wait for it."""
    values, fault = None, ""
    if chunk is not None:
        try:
            values = array.read(chunk)
        except ConfigError as error:
            fault = str(error)
    if faults := list(filter(None, gather(fault))):
        raise ConfigError(faults[0])
    return values


def _piece_shape(chunk_shape: Sequence[int], most_values: int) -> tuple[int, ...]:
    """Cuts a chunk along its leading axes until a piece has at most `most_values` values."""
    shape = list(chunk_shape)
    for axis, side in enumerate(shape):
        excess = math.prod(shape) / max(1, most_values)
        if excess > 1:
            shape[axis] = max(1, int(side / excess))
    return tuple(shape)


def _piece_starts(chunk_shape: Sequence[int], piece_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns where the pieces of a chunk begin; the last along an axis may overlap the one
    before.
    """
    counts = [-(-size // side) for size, side in zip(chunk_shape, piece_shape, strict=True)]
    return [
        tuple(
            min(number * side, size - side)
            for number, side, size in zip(numbers, piece_shape, chunk_shape, strict=True)
        )
        for numbers in np.ndindex(*counts)
    ]


Writer = Callable[[jax.Array, np.ndarray | None, list[tuple[int, ...]]], jax.Array]


def _writer(array: StoredArray, sharding: NamedSharding, piece_shape: tuple[int, ...]) -> Writer:
    """Returns a function that writes one piece of every host into the sharded array.

    It takes the array, which it consumes; this host's piece, None for none; and every host's place
    of its piece.
    """
    mesh, size = sharding.mesh, math.prod(piece_shape)
    devices = list(mesh.devices.flat)
    num_hosts = jax.process_count()
    num_local = len(devices) // num_hosts
    share = -(-size // num_local)  # values of a piece that one device of its host brings
    # The devices of a mesh need not follow their hosts in order.
    by_host = np.argsort([device.process_index for device in devices], kind="stable").reshape(
        num_hosts, num_local
    )
    along_devices = NamedSharding(mesh, P(mesh.axis_names))
    spec = P(*sharding.spec, *[None] * (len(array.shape) - len(sharding.spec)))
    local_shape = sharding.shard_shape(array.shape)

    def write_here(held: jax.Array, shares_1xS: jax.Array, places_HxA: jax.Array) -> jax.Array:
        shares_NxS = jax.lax.all_gather(shares_1xS, mesh.axis_names, tiled=True)
        pieces_HxS = shares_NxS[by_host].reshape(num_hosts, num_local * share)[:, :size]
        begins = [
            _shard_number(mesh.shape, axes) * side if axes else 0
            for axes, side in zip(spec, local_shape, strict=True)
        ]
        for host in range(num_hosts):
            piece = pieces_HxS[host].reshape(piece_shape)
            offsets = [places_HxA[host, axis] - begin for axis, begin in enumerate(begins)]
            held = _written(held, piece, offsets)
        return held

    program = jax.jit(
        jax.shard_map(
            write_here,
            mesh=mesh,
            in_specs=(spec, P(mesh.axis_names), P()),
            out_specs=spec,
            check_vma=False,
        ),
        donate_argnums=0,
    )

    def write(
        whole: jax.Array, piece: np.ndarray | None, places: list[tuple[int, ...]]
    ) -> jax.Array:
        flat = np.zeros(num_local * share, array.dtype)
        if piece is not None:
            flat[:size] = piece.reshape(-1)
        mine = [device for device in devices if device.process_index == jax.process_index()]
        shares = [
            jax.device_put(flat[number * share : (number + 1) * share][None], device)
            for number, device in enumerate(mine)
        ]
        shape = (len(devices), share)
        brought = jax.make_array_from_single_device_arrays(shape, along_devices, shares)
        places_HxA = np.array(places, np.int32).reshape(num_hosts, len(array.shape))
        written: jax.Array = program(whole, brought, places_HxA)
        return written

    return write


def _shard_number(sizes: dict[str, int], axes: str | tuple[str, ...]) -> jax.Array:
    """Returns which of an axis's shards this device holds; inside of `shard_map`."""
    number: jax.Array = jnp.int32(0)
    for name in (axes,) if isinstance(axes, str) else axes:
        number = number * sizes[name] + jax.lax.axis_index(name)
    return number


def _written(held: jax.Array, piece: jax.Array, offsets: Sequence[jax.Array]) -> jax.Array:
    """Returns a device's part of the array with the values of a piece that lie in it.

    Args:
      offsets: of the piece from the beginning of the part, along each axis; negative where it
        begins before.
    """
    sides = [min(whole, size) for whole, size in zip(held.shape, piece.shape, strict=True)]
    starts = [
        jnp.clip(offset, 0, whole - side)
        for offset, whole, side in zip(offsets, held.shape, sides, strict=True)
    ]
    values, is_inside = piece, jnp.ones(sides, bool)
    for axis, (start, offset, side) in enumerate(zip(starts, offsets, sides, strict=True)):
        numbers = start + jnp.arange(side, dtype=jnp.int32) - offset  # in the piece
        last = piece.shape[axis] - 1
        values = jnp.take(values, jnp.clip(numbers, 0, last), axis=axis)
        others = [other for other in range(piece.ndim) if other != axis]
        is_inside &= jnp.expand_dims((numbers >= 0) & (numbers <= last), others)
    before = jax.lax.dynamic_slice(held, starts, sides)
    return jax.lax.dynamic_update_slice(held, jnp.where(is_inside, values, before), starts)
