"""Placement of global batches on devices, and each host's share of the rows.

Legend: A micro-batches of M rows of L tokens; N devices, H hosts, e expansion; S slots of a staged
array.

Usually every host stages its own devices' rows, in one array of S = M slots. With load expansion (e
> 1) only one host in e reads data. A micro-batch is then staged in e arrays of S = N x ceil(M / N)
slots, each spread evenly over all devices. Slots of loading hosts have rows, in order, and others
have placeholders; the compiled program moves rows to their devices. So a loading host stages e
times its share, and other hosts stage the same array of placeholders e times. Slots are never
replicated, so that no copy of a row is a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.data.stream.rows import RowArrays

T = TypeVar("T")


class TokenRows(Protocol):
    """Rows on devices, arrays [M, L]; a kind of rows may have further arrays of that shape."""

    @property
    def tokens(self) -> jax.Array:
        """int32, token ids."""

    @property
    def segments(self) -> jax.Array:
        """int32, 1.. per document within a row, 0 at padding."""

    @property
    def weights(self) -> jax.Array:
        """float32, loss weight of each token as a target; 0 at padding rows."""


class Batch(NamedTuple):
    """Rows of a global batch, cut into A micro-batches: [A, M, L]; of one micro-batch, once
    arranged: [M, L].

    With load expansion, each field of a staged batch is a tuple of e arrays.
    """

    tokens: Any  # int32 token ids
    segments: Any  # int32, 1.. per document within a row, 0 at padding
    weights: Any  # float32 loss weight of each token as a target; 0 at padding rows
    reference: Any = None  # float32, figures of each row beside its tokens, if the stream has them
    # int32, 1 + the token that pads a sample's own row at the sample's first token, else 0; None: a
    # sample a row
    begins: Any = None
    # int32, 1 + k + K x the sample's number in its pass at the tokens of its own row k; None: K = 1
    numbers: Any = None


BATCH_DTYPES = {
    "tokens": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
}
REFERENCE_DTYPES = BATCH_DTYPES | {"reference": np.dtype(np.float32)}
PACKED_DTYPES = BATCH_DTYPES | {"begins": np.dtype(np.int32)}
NUMBERED_DTYPES = PACKED_DTYPES | {"numbers": np.dtype(np.int32)}


class BatchShape(NamedTuple):
    """The shape of a global batch as an argument of an executable."""

    micro_batch: int  # M: rows in one forward and backward pass
    max_micro_batches: int  # A: capacity in micro-batches


class Placement:
    """The placement of batches of one length on the devices.

    Args:
      final: sharding of `[A, M, L]` arrays in training.
      length: L.
      expansion: e; 1 if every host loads its own rows.
      dtypes: the arrays of a batch, by their names in the stream.

    Attributes:
      final: as given.
    """

    def __init__(
        self,
        final: NamedSharding,
        length: int,
        expansion: int = 1,
        dtypes: Mapping[str, np.dtype] = BATCH_DTYPES,
    ) -> None:
        mesh = final.mesh
        assert isinstance(mesh, Mesh), "of devices"
        self.mesh, self.spec, self.final = mesh, final.spec, final
        self.length, self._expansion = length, expansion
        self._dtypes = dict(dtypes)
        self._device_loads = np.array(
            [is_loading(d.process_index, expansion) for d in mesh.devices.flat]
        )
        self._sharding = final if expansion == 1 else NamedSharding(mesh, P(None, mesh.axis_names))
        # Every batch needs these several times; they depend only on its shape.
        self._local_slots = cache(self._find_local_slots)
        self.local_rows = cache(self._find_local_rows)
        self.padding = cache(self._make_padding)
        self.stages_all = expansion == 1 and final.is_fully_addressable

    def abstract_batch(self, shape: BatchShape) -> Batch:
        """Returns the shapes and shardings of a staged batch, for compiling ahead of time."""
        staged = (shape.max_micro_batches, self._num_slots(shape.micro_batch), self.length)
        arrays = {
            name: jax.ShapeDtypeStruct(staged, dtype, sharding=self._sharding)
            for name, dtype in self._dtypes.items()
        }
        return Batch(**{n: self._staged([array] * self._expansion) for n, array in arrays.items()})

    def arrange(self, micro_batch: int) -> Callable[[Batch], Batch]:
        """Returns the function that turns a staged micro-batch (arrays `[S, L]`) into rows (`[M,
        L]`) in a program.
        """
        if self._expansion == 1:
            return lambda staged: staged
        slots_of_part = [np.flatnonzero(row_S >= 0) for row_S in self._row_of_slot(micro_batch)]
        rows = NamedSharding(self.final.mesh, P(*self.final.spec[1:]))

        def joined(parts: Sequence[jax.Array]) -> jax.Array:
            real = [part[slots] for part, slots in zip(parts, slots_of_part, strict=True)]
            array: jax.Array = jax.lax.with_sharding_constraint(jnp.concatenate(real), rows)
            return array

        return lambda staged: Batch(*(part if part is None else joined(part) for part in staged))

    def _staged(self, parts: Sequence[T]) -> T | tuple[T, ...]:
        return tuple(parts) if self._expansion > 1 else parts[0]

    def _num_slots(self, micro_batch: int) -> int:
        if self._expansion == 1:
            return micro_batch
        num_devices = len(self._device_loads)
        return num_devices * -(-micro_batch // num_devices)

    def _row_of_slot(self, micro_batch: int) -> np.ndarray:
        """Returns int64[e, S]: the row of the micro-batch in each slot of each array, -1 for a
        placeholder.
        """
        if self._expansion == 1:
            return np.arange(micro_batch)[None]
        # Array i of e holds the rows after those of the arrays before, in its loading slots.
        per_device = self._num_slots(micro_batch) // len(self._device_loads)
        loads_S = np.repeat(self._device_loads, per_device)
        first_e = np.arange(self._expansion)[:, None] * loads_S.sum()
        row_exS = np.where(loads_S, first_e + np.cumsum(loads_S) - 1, -1)
        return np.where(row_exS < micro_batch, row_exS, -1)

    def _find_local_slots(self, num_slots: int) -> np.ndarray:
        """Returns an array's slots on this host's devices, in order."""
        indices = self._sharding.addressable_devices_indices_map((1, num_slots, self.length))
        runs = {index[1].indices(num_slots) for index in indices.values() if index}
        return np.concatenate([np.arange(*run) for run in sorted(runs)])

    def _find_local_rows(self, shape: BatchShape) -> np.ndarray:
        """Returns int64[A, e, local slots]: the row of the batch in each slot of this host, -1 for
        a placeholder.
        """
        slots = self._local_slots(self._num_slots(shape.micro_batch))
        row_exs = self._row_of_slot(shape.micro_batch)[:, slots]
        micro_A = np.arange(shape.max_micro_batches)[:, None, None] * shape.micro_batch
        return np.where(row_exs >= 0, micro_A + row_exs, -1)

    def wanted(self, num_rows: int, shape: BatchShape) -> np.ndarray:
        """Returns bool[A, e, local slots]: this host's slots with one of the `num_rows` real
        rows.
        """
        rows = self.local_rows(shape)
        return (rows >= 0) & (rows < num_rows)

    def stage(self, rows: RowArrays, num_rows: int, shape: BatchShape) -> Batch:
        """Puts this host's rows of a batch, in the order of `wanted`, on its devices, and pads the
        other slots.
        """
        wanted = self.wanted(num_rows, shape)

        def staged(name: str) -> jax.Array | tuple[jax.Array, ...]:
            if wanted.all():
                slots = rows[name].reshape(*wanted.shape, self.length)
            else:
                slots = np.zeros((*wanted.shape, self.length), self._dtypes[name])
                slots[wanted] = rows[name]
            return self._staged(
                [self._put(slots[:, part], shape) for part in range(self._expansion)]
            )

        return Batch(**{name: staged(name) for name in self._dtypes})

    def _make_padding(self, shape: BatchShape) -> Batch:
        """Returns a batch of padding, for a host without rows."""
        local = (shape.max_micro_batches, self.local_rows(shape).shape[-1], self.length)
        arrays = {
            name: self._put(np.zeros(local, dtype), shape) for name, dtype in self._dtypes.items()
        }
        return Batch(**{n: self._staged([array] * self._expansion) for n, array in arrays.items()})

    def _put(self, local: np.ndarray, shape: BatchShape) -> jax.Array:
        """Puts this host's slots of one array, `[A, local slots, L]`, on its devices."""
        num_slots = self._num_slots(shape.micro_batch)

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "asked for devices of this host only"
            # A device has one run of slots; find its place among those of this host.
            start, stop, _ = index[1].indices(num_slots)
            place = int(np.searchsorted(self._local_slots(num_slots), start))
            return local[:, place : place + stop - start, index[2]]

        whole = (shape.max_micro_batches, num_slots, self.length)
        return jax.make_array_from_callback(whole, self._sharding, of_device)


def is_loading(host: int, expansion: int) -> bool:
    """Returns whether a host reads data: the first of every e hosts."""
    return host % expansion == 0
