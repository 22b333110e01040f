"""Files of the safetensors format: a JSON header with each tensor's dtype, shape and place, then their bytes.

The format is that of https://huggingface.co/docs/safetensors. Tensors are read as memory maps, bfloat16 too, so that a
slice of one touches its own pages only, and from an object store by ranges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxbatch.system.atomic_files import writing_atomically
from maxbatch.system.errors import ConfigError, cannot_read
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import AnyPath

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_RANGE = 32 << 20  # bytes of an object that one request reads
_REQUESTS = 8  # for one tensor at a time
_MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library


class StoredTensor(NamedTuple):
    """The place of one tensor."""

    file: AnyPath
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def array(self) -> np.ndarray:
        """Returns the tensor, read-only."""
        return self.rows(0, self.shape[0]) if self.shape else self._values(self.offset, ())

    def rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows `first` to before `last`, read-only: of a memory map, or by ranges of an object."""
        row_bytes = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return self._values(self.offset + first * row_bytes, (last - first, *self.shape[1:]))

    def _values(self, begin: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = DTYPES[self.dtype]
        if 0 in shape:
            return np.zeros(shape, dtype)
        if isinstance(self.file, RemotePath):
            content = _in_ranges(self.file, begin, begin + math.prod(shape) * dtype.itemsize)
            return np.frombuffer(content, dtype).reshape(shape)
        return np.memmap(self.file, dtype, mode="r", offset=begin, shape=shape)


def _in_ranges(file: RemotePath, begin: int, end: int) -> bytes | memoryview:
    """Returns bytes of an object, a large part by several requests at a time."""
    if end - begin <= _RANGE:
        return file.read_range(begin, end)
    content = bytearray(end - begin)

    def read(first: int) -> None:
        last = min(first + _RANGE, end)
        content[first - begin : last - begin] = file.read_range(first, last)

    with ThreadPoolExecutor(_REQUESTS) as threads:
        list(threads.map(read, range(begin, end, _RANGE)))
    return memoryview(content).toreadonly()


def stored_tensors(folder: AnyPath) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name: those of its index, else of its safetensors files.

    Raises:
      ConfigError: there are none, a file is missing or damaged, or two files hold tensors of one name.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        for name, tensor in _header(file).items():
            if name in found:
                raise ConfigError(f"{folder}: {name} is in {found[name].file.name} and in {file.name}")
            found[name] = tensor
    return found


def _files(folder: AnyPath) -> Iterable[AnyPath]:
    index = folder / INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except OSError as error:
            raise cannot_read(index, error) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{index}: is not an index of safetensors files") from None
    whole = folder / "model.safetensors"
    files: list[AnyPath] = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"), key=str)
    if not files:
        raise ConfigError(f"{folder}: holds no *.safetensors; weights in another format must be converted first")
    return files


def _header(file: AnyPath) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        length = int.from_bytes(_bytes_of(file, 0, 8), "little") if size >= 8 else size
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError("too short")
        header = json.loads(_bytes_of(file, 8, 8 + length))
        header.pop("__metadata__", None)
        return {name: _tensor(file, entry, 8 + length, size) for name, entry in header.items()}
    except OSError as error:
        raise cannot_read(file, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: is not a whole safetensors file") from None


def _bytes_of(file: AnyPath, begin: int, end: int) -> bytes:
    if isinstance(file, RemotePath):
        return file.read_range(begin, end)
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(end - begin)


def _tensor(file: AnyPath, entry: dict[str, Any], start: int, size: int) -> StoredTensor:
    shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = DTYPES.get(entry["dtype"])
    if start + end > size or first < 0 or (dtype and end - first != math.prod(shape) * dtype.itemsize):
        raise ValueError("its tensors do not lie in it")
    return StoredTensor(file, entry["dtype"], shape, start + first)


def write_tensors(
    path: AnyPath, dtype: str, shapes: Mapping[str, tuple[int, ...]], arrays: Iterator[np.ndarray]
) -> None:
    """Writes a safetensors file, one tensor at a time.

    Args:
      path: the file.
      dtype: of every tensor, as the format names it.
      shapes: of the tensors, by name, in their order.
      arrays: yields the tensors in this order, and perhaps more, which it keeps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, shape in shapes.items():
        end = first + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in shapes:
            file.write(next(arrays).tobytes())
