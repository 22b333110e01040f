"""A parameter onto the devices of one or several hosts, each of which reads a share of the chunks.

The chunks of a checkpoint follow the mesh that wrote it. So each chunk is read by one host, piece
by piece, and each round takes one piece of every host to the hosts whose devices hold a part of it.
A host sends what they need of its piece and nothing else. Beside its parts of the parameter it
holds the pieces of one round, never a chunk. All rounds are one small program, since pieces are
cut and put into their places in host memory.

Shapes: H hosts of D devices.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.around.maxtext.checkpoints.layout import (
    Runs,
    Spans,
    as_stored,
    copies,
    lacks_layers,
    most_values,
    runs_of,
    with_layers,
)
from maxbatch.around.maxtext.checkpoints.names import LAYER_AXIS, Place
from maxbatch.around.maxtext.checkpoints.stored import StoredArray
from maxbatch.parallel.hosts import gather
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.host_arrays import empty_aligned, return_freed_memory, zeros_to_copy

_MOST_ROUND, _LEAST_ROUND = 256 << 20, 256 << 10  # bytes of the pieces of all hosts
_ROUNDS = 64  # of the size of a host's share
_SIZES = 8  # of what hosts send to each other in a round: from the most to this part of it
_CHUNKS_AT_A_TIME = 4  # by a host that needs no other


def round_bytes(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns how many bytes are exchanged in a round, few beside this host's share of the
    arrays.
    """
    share = 0
    for leaf in leaves:
        assert leaf.sharding is not None
        part = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        share += part * len(leaf.sharding.addressable_devices)
    most = min(max(share // _ROUNDS, _LEAST_ROUND), _MOST_ROUND)
    return 1 << (most.bit_length() - 1)  # as the buffers of a round, none of which is then larger


def read_parameter(
    stored: Mapping[str, StoredArray],
    place: Place,
    abstract: jax.ShapeDtypeStruct,
    scale: tuple[float, float],
    most_bytes: int,
) -> jax.Array:
    """Returns a parameter, or its moment, each device holding its own part. All hosts of its
    sharding call this for the same parameters in one order.

    Args:
      scale: a factor of MaxText's values, and what is then added.
      most_bytes: of the pieces of all hosts in a round.

    Raises:
      ConfigError: a chunk is damaged or cannot be read, on any host.
    """
    sharding = abstract.sharding
    assert sharding is not None
    part_of = {
        device: tuple(
            cut.indices(size)[:2] for cut, size in zip(index, abstract.shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(abstract.shape).items()
    }
    hosts = sorted({device.process_index for device in part_of})
    here = hosts.index(jax.process_index())
    parts_of: list[list[Spans]] = [
        sorted({part for device, part in part_of.items() if device.process_index == host})
        for host in hosts
    ]
    own_parts = _Parts(abstract, part_of)
    fault = ""
    for name in dict.fromkeys(place.arrays):
        runs = [[runs_of(place, name, abstract.shape, part) for part in of] for of in parts_of]
        targets = [
            [as_stored(place, array) for array in own_parts.memory[part]] for part in parts_of[here]
        ]
        reading = _Reading(
            stored[name], lacks_layers(place, name), runs, targets, scale, here, most_bytes
        )
        failed = reading.read_own() if reading.is_local else reading.exchange(_mesh(part_of))
        fault = fault or failed
    return_freed_memory()
    faults = [fault] if len(hosts) == 1 else gather(fault)
    if any(faults):
        raise ConfigError(next(filter(None, faults)))
    return own_parts.finished()


class _Parts:
    """Memory for this host's parts of a parameter, and then the parameter.

    CPU devices, which share the host's memory, have the parts at once: an array of theirs would
    either be a copy or adopt the memory, which no update could then reuse.
    """

    def __init__(self, abstract: jax.ShapeDtypeStruct, part_of: dict[jax.Device, Spans]) -> None:
        self._abstract = abstract
        self._part_of = {
            device: part
            for device, part in part_of.items()
            if device.process_index == jax.process_index()
        }
        self._on_cpu: dict[jax.Device, jax.Array] = {}
        self.memory: dict[Spans, list[np.ndarray]] = defaultdict(
            list
        )  # of each part, or its copies
        for device, part in self._part_of.items():
            sides = [end - begin for begin, end in part]
            if device.platform == "cpu":
                zeros = jax.device_put(zeros_to_copy(sides, abstract.dtype), device)
                self._on_cpu[device] = zeros.block_until_ready()
                self.memory[part].append(_memory_of(zeros))
            elif part not in self.memory:
                self.memory[part].append(np.empty(sides, abstract.dtype))

    def finished(self) -> jax.Array:
        """Returns the parameter; all values are in the memory."""
        held = self._on_cpu or {
            device: jax.device_put(self.memory[part][0], device)
            for device, part in self._part_of.items()
        }
        assert self._abstract.sharding is not None
        whole: jax.Array = jax.make_array_from_single_device_arrays(
            self._abstract.shape, self._abstract.sharding, list(held.values())
        )
        return whole.block_until_ready()


def _memory_of(held: jax.Array) -> np.ndarray:
    """Returns the memory of an array on a CPU device, which nothing else has seen yet."""
    num_bytes = ctypes.c_uint8 * held.nbytes
    memory = np.ctypeslib.as_array(num_bytes.from_address(held.unsafe_buffer_pointer()))
    values: np.ndarray = memory.view(held.dtype).reshape(held.shape)
    return values


class _Reading:
    """One stored array on its way into the parts of all hosts.

    Args:
      is_layer: whether it is one layer of a stack, without an axis of layers.
      runs: the runs of the array that each part of each host reads.
      targets: the memory of each of this host's parts and its copies, with the array's axes.
      scale: a factor of its values, and what is then added.
      here: this host's number.
      most_bytes: of the pieces of all hosts in a round.
    """

    def __init__(
        self,
        array: StoredArray,
        is_layer: bool,
        runs: list[list[Runs]],
        targets: list[list[np.ndarray]],
        scale: tuple[float, float],
        here: int,
        most_bytes: int,
    ) -> None:
        self._array, self._is_layer, self._runs, self._targets = array, is_layer, runs, targets
        self._factor, self._offset = np.float32(scale[0]), np.float32(scale[1])
        self._is_scaled = scale != (1.0, 0.0)
        self._here, self._ahead_bytes = here, most_bytes // len(runs)
        self._sides = piece_sides(array.chunk_shape, self._ahead_bytes // array.dtype.itemsize)
        chunks = array.chunks
        self._takers = [self._taking(chunk) for chunk in chunks]
        self._chunks_of: list[list[Spans]] = [[] for _ in runs]
        most_chunks = -(-len(chunks) // len(runs))
        for chunk, taken in zip(chunks, self._takers, strict=True):
            free = [host for host, of in enumerate(self._chunks_of) if len(of) < most_chunks]
            reader = max(free, key=lambda host: (taken[host], -len(self._chunks_of[host]), -host))
            self._chunks_of[reader].append(chunk)
            taken[reader] = 0

    @property
    def is_local(self) -> bool:
        """Whether every host reads what it needs itself."""
        return not any(any(taken) for taken in self._takers)

    def read_own(self) -> str:
        """Reads this host's chunks into its parts; returns what failed."""

        def read(chunk: Spans) -> None:
            pieces = self._array.pieces_of(chunk, self._sides)
            values = self._array.read_pieces(
                chunk, self._sides, self._ahead_bytes // _CHUNKS_AT_A_TIME
            )
            for piece, value in zip(pieces, values, strict=True):
                self._keep(piece, value)

        at_a_time = 1 if self._array.encoding is None else _CHUNKS_AT_A_TIME
        with ThreadPoolExecutor(at_a_time) as threads:
            try:
                list(threads.map(read, self._chunks_of[self._here]))
            except ConfigError as error:
                return str(error)
        return ""

    def exchange(self, mesh: Mesh) -> str:
        """Reads this host's chunks, and exchanges their pieces in rounds; returns what failed.

        A host whose chunk is damaged stays in the rounds, so that no other waits for it.
        """
        num_hosts, num_devices = mesh.devices.shape
        capacity = max(
            sum(most_values(runs, self._with_layers(self._sides)) for runs in of)
            for of in self._runs
        )
        capacity = min(capacity, math.prod(self._sides)) * self._array.dtype.itemsize
        # What one device sends to one host, in few sizes, each of which compiles.
        words = -(-max(capacity, self._ahead_bytes // _SIZES) // (4 * num_devices))
        words = 1 << (words - 1).bit_length()
        mine, fault = self._values(), ""
        for pieces in itertools.zip_longest(*map(self._pieces, range(num_hosts))):
            values, sent = None, empty_aligned([num_devices, num_hosts, words], np.dtype(np.uint32))
            try:
                values = next(mine, None)
            except ConfigError as error:
                fault = str(error)
            if values is not None:
                self._keep(pieces[self._here], values)
                for host in range(num_hosts):
                    if host != self._here:
                        self._pack(pieces[self._here], values, host, sent[:, host])
            received = _exchanged(mesh, sent)
            for host, piece in enumerate(pieces):
                if host != self._here and piece is not None:
                    self._unpack(piece, np.stack([of_device[host] for of_device in received]))
        return fault

    def _pieces(self, host: int) -> Iterator[Spans]:
        for chunk in self._chunks_of[host]:
            yield from self._array.pieces_of(chunk, self._sides)

    def _values(self) -> Iterator[np.ndarray]:
        for chunk in self._chunks_of[self._here]:
            yield from self._array.read_pieces(chunk, self._sides, self._ahead_bytes)

    def _taking(self, chunk: Spans) -> list[int]:
        """Returns how many values each host takes from a chunk."""
        place = self._placed(chunk)
        return [
            sum(math.prod(copy.shape) for runs in of for copy in copies(runs, place))
            for of in self._runs
        ]

    def _placed(self, spans: Spans) -> Spans:
        return with_layers(spans) if self._is_layer else spans

    def _with_layers(self, sides: Sequence[int]) -> Sequence[int]:
        return (*sides[:LAYER_AXIS], 1, *sides[LAYER_AXIS:]) if self._is_layer else sides

    def _keep(self, piece: Spans, values: np.ndarray) -> None:
        """Puts what this host needs of a piece into its parts."""
        values = np.expand_dims(values, LAYER_AXIS) if self._is_layer else values
        for runs, targets in zip(self._runs[self._here], self._targets, strict=True):
            for copy in copies(runs, self._placed(piece)):
                for target in targets:
                    target[copy.target] = self._scaled(values[copy.source])

    def _pack(self, piece: Spans, values: np.ndarray, host: int, words_DxW: np.ndarray) -> None:
        """Puts what another host needs of a piece into the words that the devices send to it."""
        values = np.expand_dims(values, LAYER_AXIS) if self._is_layer else values
        words = np.empty(words_DxW.shape, np.uint32)
        packed = words.reshape(-1).view(np.uint8)
        used = 0
        for runs in self._runs[host]:
            for copy in copies(runs, self._placed(piece)):
                size = math.prod(copy.shape) * values.dtype.itemsize
                memory = packed[used : used + size].view(values.dtype).reshape(copy.shape)
                memory[...] = values[copy.source]
                used += size
        if used:
            words_DxW[...] = words

    def _unpack(self, piece: Spans, words_DxW: np.ndarray) -> None:
        """Puts what another host sent of its piece into this host's parts."""
        packed = words_DxW.reshape(-1).view(np.uint8)
        dtype, used = self._array.dtype, 0
        for runs, targets in zip(self._runs[self._here], self._targets, strict=True):
            for copy in copies(runs, self._placed(piece)):
                size = math.prod(copy.shape) * dtype.itemsize
                values = packed[used : used + size].view(dtype).reshape(copy.shape)
                for target in targets:
                    target[copy.target] = self._scaled(values)
                used += size

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        if not self._is_scaled:
            return values
        return values.astype(np.float32) * self._factor + self._offset


def piece_sides(chunk_shape: Sequence[int], most_values: int) -> tuple[int, ...]:
    """Cuts a chunk along its leading axes until a piece has at most `most_values` values, or one;
    pieces in order are then the chunk's values in order.
    """
    shape = list(chunk_shape)
    for axis, side in enumerate(shape):
        excess = math.prod(shape) / max(1, most_values)
        if excess > 1:
            shape[axis] = max(1, int(side / excess))
    return tuple(shape)


def _mesh(devices: Iterable[jax.Device]) -> Mesh:
    """Returns the devices by host."""
    in_order = sorted(devices, key=lambda device: (device.process_index, device.id))
    num_hosts = len({device.process_index for device in in_order})
    return Mesh(np.array(in_order).reshape(num_hosts, -1), ("hosts", "devices"))


@functools.cache
def _exchanger(mesh: Mesh) -> Any:
    """Returns the program of a round: what each device has for every host goes to the device of
    the same number there.
    """
    by_host = P("hosts", "devices")
    return jax.jit(
        jax.shard_map(
            lambda sent_1x1xHxW: jax.lax.all_to_all(sent_1x1xHxW, "hosts", 2, 2, tiled=True),
            mesh=mesh,
            in_specs=by_host,
            out_specs=by_host,
        )
    )


def _exchanged(mesh: Mesh, sent_DxHxW: np.ndarray) -> list[np.ndarray]:
    """Returns, for each device of this host, the words received from every host."""
    sharding = NamedSharding(mesh, P("hosts", "devices"))
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    sent = [
        jax.device_put(of_device[None, None], device)
        for of_device, device in zip(sent_DxHxW, mine, strict=True)
    ]
    shape = (*mesh.devices.shape, *sent_DxHxW.shape[1:])
    # Of two programs in flight on CPU devices, each can hold threads that the other waits for.
    received = _exchanger(mesh)(
        jax.make_array_from_single_device_arrays(shape, sharding, sent)
    ).block_until_ready()
    by_device = {
        shard.device: np.asarray(shard.data)[0, 0] for shard in received.addressable_shards
    }
    return [by_device[device] for device in mine]
