"""Files of the safetensors format: a JSON header with each tensor's dtype, shape and place, then
their bytes.

The format is that of https://huggingface.co/docs/safetensors. Tensors are read as memory maps,
bfloat16 too, so that a slice of one touches its own pages only, and from an object store by ranges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.processes.threads import in_threads
from maxbatch.system.storage.atomic_files import writing_atomically
from maxbatch.system.storage.bounded import read_json
from maxbatch.system.storage.storage import AnyPath, is_remote, read_range

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# The types that a config names, as the format does.
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_RANGE = 32 << 20  # bytes of an object that one request reads
_REQUESTS = 8  # for one tensor at a time
_MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MOST_INDEX_BYTES = 64 << 20
# Bits of a value of each type that the format has.
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


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
        """Returns rows `first` to before `last`, read-only: of a memory map, or by ranges of an
        object.
        """
        row_bytes = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return self._values(self.offset + first * row_bytes, (last - first, *self.shape[1:]))

    def _values(self, begin: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = DTYPES[self.dtype]
        if 0 in shape:
            return np.zeros(shape, dtype)
        if is_remote(self.file):
            content = _in_ranges(self.file, begin, begin + math.prod(shape) * dtype.itemsize)
            return np.frombuffer(content, dtype).reshape(shape)
        return np.memmap(self.file, dtype, mode="r", offset=begin, shape=shape)


def _in_ranges(file: AnyPath, begin: int, end: int) -> bytes | memoryview:
    """Returns bytes of an object, a large part by several requests at a time."""
    if end - begin <= _RANGE:
        return read_range(file, begin, end)
    content = bytearray(end - begin)

    def read(first: int) -> None:
        last = min(first + _RANGE, end)
        content[first - begin : last - begin] = read_range(file, first, last)

    in_threads(read, range(begin, end, _RANGE), _REQUESTS)
    return memoryview(content).toreadonly()


def stored_tensors(folder: AnyPath) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name: those of its index, else of its safetensors files.

    Raises:
      ConfigError: there are none, a file is missing or damaged, or two files hold tensors of one
        name.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in tensor_files(folder):
        for name, tensor in _header(file).items():
            if name in tensors:
                raise ConfigError(
                    f"{folder}: {name} is in {tensors[name].file.name} and in {file.name}"
                )
            tensors[name] = tensor
    return tensors


def tensor_files(folder: AnyPath) -> Iterable[AnyPath]:
    """Returns the files that `stored_tensors` reads; raises as it does."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    whole = folder / "model.safetensors"
    files: list[AnyPath] = (
        [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"), key=str)
    )
    if not files:
        raise ConfigError(
            f"{folder}: holds no *.safetensors; weights in another format must be converted first"
        )
    return files


def _indexed(index: AnyPath) -> list[str]:
    """Returns the files that an index names, all of them in its folder."""
    with reading(index):
        content = read_json(index, str(index), most_bytes=_MOST_INDEX_BYTES)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{index}: is not an index of safetensors files")
    names = sorted(set(files.values()))
    if outside := [
        name for name in names if not name or "\0" in name or {"", ".", ".."} & set(name.split("/"))
    ]:
        raise ConfigError(
            f"{index}: names the file {outside[0][:200]!r}; files must be in the folder of their "
            "index"
        )
    return names


def _header(file: AnyPath) -> dict[str, StoredTensor]:
    """Returns the tensors of a file, checked by the rules of the format's own library and for
    unique keys.
    """
    with reading(file):
        try:
            size = file.stat().st_size
            length = int.from_bytes(read_range(file, 0, 8), "little") if size >= 8 else 0
            if size < 8 or length > size - 8:
                raise ValueError("its header is cut off")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header is larger than {_MOST_HEADER_BYTES:,} bytes")
            text = read_range(file, 8, 8 + length).decode("utf-8")
            header = read_json(text, "its header", most_bytes=_MOST_HEADER_BYTES, unique=True)
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
            _check_metadata(header.pop("__metadata__", None))
            return _tensors(
                file,
                {name: _Entry.of(name, entry) for name, entry in header.items()},
                8 + length,
                size,
            )
        except ValueError as error:
            raise ConfigError(f"{file}: is not a whole safetensors file ({error})") from None


def _check_metadata(metadata: object) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise ValueError("its __metadata__ must be an object of texts")


class _Entry(NamedTuple):
    """A tensor as a header states it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int

    @classmethod
    def of(cls, name: str, entry: object) -> _Entry:
        """Returns the entry of a tensor; raises ValueError if it is not one, or its range does not
        match its shape.
        """
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
        if not (
            isinstance(dtype, str)
            and _are_whole(shape)
            and _are_whole(offsets)
            and len(offsets) == 2
        ):
            raise ValueError(
                f"{name[:200]!r} has no type, or its shape or offsets are no whole numbers"
            )
        if dtype not in _BITS:
            raise ValueError(
                f"{name[:200]!r} has the type {dtype[:40]!r}, which the format does not have"
            )
        first, end = offsets
        if 8 * (end - first) != _num_values(shape) * _BITS[dtype]:
            raise ValueError(
                f"{name[:200]!r} has {end - first} bytes, which are not those of its type and shape"
            )
        return cls(dtype, tuple(shape), first, end)


def _num_values(shape: list[int]) -> int:
    """Returns the product of a shape; beyond 64 bits, some larger number."""
    num_values = 1
    for size in shape:
        num_values *= size
        if num_values >= 2**64:
            break
    return num_values


def _are_whole(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < 2**64 for number in value
    )


def _tensors(
    file: AnyPath, entries: dict[str, _Entry], start: int, size: int
) -> dict[str, StoredTensor]:
    """Returns the place of each tensor; together they must cover the bytes from `start` to `size`,
    each once.
    """
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].end)):
        if entry.first != reached:
            raise ValueError(
                f"{name[:200]!r} begins at byte {entry.first} of the tensors, and must at byte "
                f"{reached}"
            )
        reached = entry.end
    if start + reached != size:
        raise ValueError(f"its tensors have {reached} bytes, and {size - start} follow its header")
    return {
        name: StoredTensor(file, dtype, shape, start + first)
        for name, (dtype, shape, first, _) in entries.items()
    }


def write_tensors(
    path: AnyPath,
    dtypes: str | Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterator[np.ndarray],
) -> None:
    """Writes a safetensors file, one tensor at a time.

    Args:
      path: the file.
      dtypes: of every tensor, as the format names it, or by its name.
      shapes: of the tensors, by name, in their order.
      arrays: yields the tensors in this order; what follows them is not read.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, shape in shapes.items():
        dtype = dtypes if isinstance(dtypes, str) else dtypes[name]
        end = first + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in shapes:
            file.write(next(arrays).tobytes())
