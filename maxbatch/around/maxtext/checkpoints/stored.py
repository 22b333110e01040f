"""Arrays of a MaxText checkpoint, read piece by piece through TensorStore
(https://google.github.io/tensorstore).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxbatch.around.maxtext.checkpoints.encoded import Encoding, Fill, encoding_of
from maxbatch.around.maxtext.checkpoints.folder import ItemsFolder
from maxbatch.around.maxtext.checkpoints.layout import Spans
from maxbatch.system.errors import ConfigError, one_line
from maxbatch.system.storage.key_value_stores import key_value_store

_MOST_OPEN = 256  # arrays that are opened at a time
_AT_A_TIME = 4  # threads that read files, each with memory of its own
_CACHE_BYTES = 1 << 20  # of metadata that all arrays share, such as where a store's values are


class StoredArray(NamedTuple):
    """An array of a checkpoint; its values are still on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]  # smallest part that can be read by itself
    store: Any  # tensorstore.TensorStore
    stated: str  # "key=path" of its checkpoint, for messages
    encoding: Encoding | None  # None: only TensorStore reads its chunks, whole

    @property
    def chunks(self) -> list[Spans]:
        """The chunks that the array consists of, in order; those at its ends may be smaller."""
        edges = [
            [(begin, min(begin + side, size)) for begin in range(0, size, side)]
            for size, side in zip(self.shape, self.chunk_shape, strict=True)
        ]
        return list(itertools.product(*edges))

    def read(self, spans: Spans) -> np.ndarray:
        """Returns a part of the array.

        Raises:
          ConfigError: the files are damaged, or cannot be read.
        """
        with _one_line_for(self.stated, self.name):
            part: np.ndarray = self.store[tuple(slice(*span) for span in spans)].read().result()
            return part

    def pieces_of(self, chunk: Spans, sides: Sequence[int]) -> Iterator[Spans]:
        """Yields the places in the array of a chunk's pieces in order; beyond the array's end they
        are empty.

        Args:
          sides: of a piece; whole along all axes after the first that is neither 1 nor whole.
        """
        along = [
            [
                (min(first, size), min(first + side, begin + whole, size))
                for first in range(begin, begin + whole, side)
            ]
            for (begin, _), side, whole, size in zip(
                chunk, sides, self.chunk_shape, self.shape, strict=True
            )
        ]
        yield from itertools.product(*along)

    def read_pieces(
        self, chunk: Spans, sides: Sequence[int], ahead_bytes: int
    ) -> Iterator[np.ndarray]:
        """Yields the values of a chunk's pieces (`pieces_of`), each valid until the next.

        Args:
          ahead_bytes: how much of the chunk is read before it is needed.

        Raises:
          ConfigError: the files are damaged, or cannot be read.
        """
        with _one_line_for(self.stated, self.name):
            fill = self._opened(chunk, ahead_bytes)
            if fill is None:
                whole = self.read(chunk)
                for piece in self.pieces_of(chunk, sides):
                    places = zip(piece, chunk, strict=True)
                    yield whole[
                        tuple(
                            slice(begin - first, end - first) for (begin, end), (first, _) in places
                        )
                    ]
                return
            # A chunk at an end of the array is stored as large as the others.
            edges = [
                [min(side, whole - first) for first in range(0, whole, side)]
                for side, whole in zip(sides, self.chunk_shape, strict=True)
            ]
            memory = np.empty(math.prod(sides), self.dtype)
            for piece, shape in zip(
                self.pieces_of(chunk, sides), itertools.product(*edges), strict=True
            ):
                values = memory[: math.prod(shape)].reshape(shape)
                fill(values)
                yield values[tuple(slice(end - begin) for begin, end in piece)]

    def _opened(self, chunk: Spans, ahead_bytes: int) -> Fill | None:
        if self.encoding is None:
            return None
        numbers = (begin // side for (begin, _), side in zip(chunk, self.chunk_shape, strict=True))
        num_bytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        return self.encoding.open(tuple(numbers), num_bytes, ahead_bytes)


def open_arrays(folder: ItemsFolder, names: Sequence[str]) -> dict[str, StoredArray]:
    """Opens arrays of a checkpoint by name, without reading values.

    Raises:
      ConfigError: an array is missing, or its description is damaged; or TensorStore is not
        installed.
    """
    tensorstore = import_tensorstore()
    # One context: its pool of cached metadata and its limits of concurrent reads hold for all
    # arrays together.
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": _AT_A_TIME},
            "data_copy_concurrency": {"limit": _AT_A_TIME},
        }
    )
    opened: dict[str, StoredArray] = {}
    for first in range(0, len(names), _MOST_OPEN):
        some = names[first : first + _MOST_OPEN]
        futures = [
            tensorstore.open(_spec(folder, name), read=True, open=True, context=context)
            for name in some
        ]
        for name, future in zip(some, futures, strict=True):
            with _one_line_for(folder.stated, name):
                store = future.result()
                chunk = tuple(
                    side or size
                    for side, size in zip(_chunk_shape(store), store.shape, strict=True)
                )
                opened[name] = StoredArray(
                    name,
                    tuple(store.shape),
                    store.dtype.numpy_dtype,
                    chunk,
                    store,
                    folder.stated,
                    encoding_of(store),
                )
    return opened


def import_tensorstore() -> Any:
    """Returns the module.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import tensorstore
    except ImportError:
        raise ConfigError(
            "MaxText's checkpoints need TensorStore, which is not installed; works: pip install "
            "'maxbatch[maxtext]'"
        ) from None
    return tensorstore


def _chunk_shape(store: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = tuple(store.chunk_layout.read_chunk.shape or store.shape)
    return shape


def _spec(folder: ItemsFolder, name: str) -> Mapping[str, object]:
    store = key_value_store(folder.path)
    if folder.uses_ocdbt:
        kvstore: dict[str, object] = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
    else:
        kvstore = store | {"path": f"{store['path']}{name}/"}
    return {"driver": "zarr3" if folder.uses_zarr3 else "zarr", "kvstore": kvstore}


@contextlib.contextmanager
def _one_line_for(source: str, name: str) -> Iterator[None]:
    """Turns any failure to read an array into one line that names the array."""
    try:
        yield
    except ConfigError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # damaged files can raise anything
        raise ConfigError(
            f"{source}: its array {name} cannot be read ({one_line(error, 200)})"
        ) from error
