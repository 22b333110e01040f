"""Arrays of a MaxText checkpoint, read chunk by chunk through TensorStore
(https://google.github.io/tensorstore).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxbatch.maxtext.checkpoints.folder import ItemsFolder
from maxbatch.system.errors import ConfigError, one_line
from maxbatch.system.key_value_stores import key_value_store

Spans = tuple[tuple[int, int], ...]  # begin and end along each axis
_MOST_OPEN = 256  # arrays that are opened at a time


class StoredArray(NamedTuple):
    """An array of a checkpoint; its values are still on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]  # smallest part that can be read by itself
    store: Any  # tensorstore.TensorStore
    stated: str  # "key=path" of its checkpoint, for messages

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


def open_arrays(folder: ItemsFolder, names: Sequence[str]) -> dict[str, StoredArray]:
    """Opens arrays of a checkpoint by name, without reading values.

    Raises:
      ConfigError: an array is missing, or its description is damaged; or TensorStore is not
        installed.
    """
    tensorstore = import_tensorstore()
    # One context: its pool of cached metadata and its limits of concurrent reads hold for all
    # arrays together.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
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
                    name, tuple(store.shape), store.dtype.numpy_dtype, chunk, store, folder.stated
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
def _one_line_for(stated: str, name: str) -> Iterator[None]:
    """Turns any failure to read an array into one line that names the array."""
    try:
        yield
    except ConfigError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # damaged files can raise anything
        raise ConfigError(
            f"{stated}: its array {name} cannot be read ({one_line(error, 200)})"
        ) from error
