"""Files of a state: blocks of its arrays, on a disk or in an object store, and their indices; no
JAX.

A block is a rectangle of an array whose values are adjacent in the memory of one device: its shard,
or rows of it. Its name, such as `3:0-16,0-64`, gives the array's index in the state, and the first
and the last index, exclusive, of each dimension. Data files hold blocks one after another. An index
(JSON) names the arrays, and each block's file, offset and CRC-32; it carries a checksum over
itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from maxbatch.run.folder.old_forms import old_form
from maxbatch.run.folder.position import DamagedError
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.processes.threads import in_threads
from maxbatch.system.storage import bounded
from maxbatch.system.storage.storage import AnyPath, file_sizes, read_range, write_parts

INDEX = "index.json"  # of the arrays in a folder
THREADS = 4  # that read, copy or write blocks
_MOST_BLOCK = 16 << 20  # bytes; a reader of a part of an array reads whole blocks
_MOST_READ = 32 << 20  # bytes of neighbouring blocks read by one request
_MOST_FILE = 64 << 20  # bytes, which one request writes to a store
# Bounds of an index: a whole state has a block of each device for each array, of some 60 bytes and
# 5 values.
_MOST_INDEX, _MOST_VALUES = 4 << 30, 300_000_000
# a file is missing or of another kind
DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

K = TypeVar("K")
Spans = tuple[tuple[int, int], ...]
Files = dict[str, list[tuple[str, int, int]]]  # by data file: name, offset and CRC-32 of its blocks
OTHER_ARRAYS = "its arrays are those of another model or optimizer"


class ArrayForm(NamedTuple):
    """An array of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Place(NamedTuple):
    """The place of a block, and the checksum of its bytes."""

    file: str  # beside the index
    offset: int
    checksum: int


class StoredArrays(NamedTuple):
    """Arrays, or parts of them, in data files of one folder."""

    folder: AnyPath
    forms: tuple[ArrayForm, ...]
    places: Mapping[str, Place]  # by the name of the block
    sizes: Mapping[str, int]  # bytes of the files that are there

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of a block, by its name."""
        return num_bytes(self.forms, name)


def block_name(array: int, spans: Spans) -> str:
    """Returns the name of a block: its array and its rectangle, such as `3:0-128,64-128`."""
    return f"{array}:{','.join(f'{first}-{last}' for first, last in spans)}"


def block_of(name: str) -> tuple[int, Spans]:
    """Parses a block's name into array and rectangle; raises ValueError for other text."""
    array, _, rest = name.partition(":")
    spans = [bounds.partition("-") for bounds in rest.split(",")] if rest else []
    return int(array), tuple((int(first), int(last)) for first, _, last in spans)


def sides(spans: Spans) -> tuple[int, ...]:
    """Returns the shape of a rectangle."""
    return tuple(last - first for first, last in spans)


def num_bytes(forms: Sequence[ArrayForm], name: str) -> int:
    """Returns the size of a block."""
    array, spans = block_of(name)
    return math.prod(sides(spans)) * np.dtype(forms[array].dtype).itemsize


def within(part: Spans, whole: Spans) -> tuple[slice, ...]:
    """Returns the slices of a rectangle in an array that holds another one around it."""
    return tuple(
        slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True)
    )


def bytes_of(block: np.ndarray) -> np.ndarray:
    """Returns the bytes of a block, uint8[bytes]."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def cut(array: int, spans: Spans, shard: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the blocks of a shard, as views: none if it is empty."""
    for part in _parts(spans, shard.itemsize) if shard.size else ():
        yield block_name(array, part), shard[within(part, spans)]


def _parts(spans: Spans, itemsize: int, axis: int = 0) -> Iterator[Spans]:
    """Cuts a rectangle along its first axes into parts of at most `_MOST_BLOCK` bytes."""
    if math.prod(sides(spans)) * itemsize <= _MOST_BLOCK or axis == len(spans):
        yield spans
        return
    first, last = spans[axis]
    step = max(1, _MOST_BLOCK // (math.prod(sides(spans[axis + 1 :])) * itemsize))
    for begin in range(first, last, step):
        part = (*spans[:axis], (begin, min(last, begin + step)), *spans[axis + 1 :])
        yield from _parts(part, itemsize, axis + 1)


# --- writing ---


def write_blocks(folder: AnyPath, name: str, blocks: Mapping[str, np.ndarray]) -> Files:
    """Writes blocks into new data files of `_MOST_FILE` bytes or so.

    Args:
      name: begins their names, which no other writer may use.

    Raises:
      OSError, ConfigError, TrainingError: a write failed; files may be left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: block.nbytes for name, block in blocks.items()}
    files = {
        f"{name}-{number}.bin": group for number, group in enumerate(in_groups(sizes, _MOST_FILE))
    }

    def write(file: str) -> list[tuple[str, int, int]]:
        contents = [bytes_of(blocks[block]).data for block in files[file]]
        write_parts(folder / file, contents)
        offsets = accumulate(map(len, contents), initial=0)
        return list(zip(files[file], offsets, map(zlib.crc32, contents), strict=False))

    return dict(zip(files, in_threads(write, files, THREADS), strict=True))


def in_groups(sizes: Mapping[K, int], most: int) -> Iterator[list[K]]:
    """Yields the keys in order, in groups of at most `most` bytes, or of a single larger one."""
    group, total = list[K](), 0
    for key, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(key)
        total += size
    if group:
        yield group


def index_of(forms: Sequence[ArrayForm], files: Files, **more: object) -> bytes:
    """Returns the index of data files; `more` are further entries."""
    content = {"arrays": forms, "files": files, **more}
    return json.dumps(content | {"checksum": _checksum(content)}).encode()


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- reading ---


def read_index(path: AnyPath) -> tuple[StoredArrays, dict[str, Any]]:
    """Returns the arrays of an index and its whole content; blocks are checked when they are read.

    Raises:
      FileNotFoundError: there is none.
      DamagedError: its content is invalid.
      OSError, ConfigError, TrainingError: the system or the store refuses, or the index is in an
        old form.
    """
    try:
        content = bounded.read_json(
            path, str(path), most_bytes=_MOST_INDEX, most_values=_MOST_VALUES, finite=False
        )
        if content.pop("checksum") != _checksum(content):
            raise DamagedError(f"{path.name} does not match its checksum")
        forms = tuple(_form(*fields) for fields in content["arrays"])
        if "files" not in content and "blocks" in content:
            raise old_form(path.parent, "all blocks are in one file")
        places = {
            name: _place(forms, file, name, *fields)
            for file, blocks in content["files"].items()
            for name, *fields in blocks
        }
        return StoredArrays(path.parent, forms, places, file_sizes(path.parent)), content
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        raise DamagedError(f"{path.name} cannot be read") from None


def _form(name: object, shape: Sequence[object], dtype: object) -> ArrayForm:
    """Returns a stored array's form; raises TypeError or ValueError for other values."""
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
        raise TypeError("not the form of an array")
    if np.dtype(dtype).hasobject or np.dtype(dtype).itemsize == 0:
        raise ValueError("not a type of numbers")
    return ArrayForm(name, tuple(map(_count, shape)), dtype)


def _place(
    forms: Sequence[ArrayForm], file: str, name: object, offset: object, checksum: object
) -> Place:
    """Returns a block's place, once the block lies in its array; raises TypeError or ValueError if
    it does not.
    """
    if not isinstance(name, str) or "/" in file or file in ("", ".", ".."):
        raise TypeError("not the place of a block")
    array, spans = block_of(name)
    if not 0 <= array < len(forms) or block_name(array, spans) != name:
        raise ValueError("not a block of an array")
    shape = forms[array].shape
    if len(spans) != len(shape) or not all(
        0 <= first < last <= size for (first, last), size in zip(spans, shape, strict=True)
    ):
        raise ValueError("not within its array")
    return Place(file, _count(offset), _count(checksum))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a count")
    return value


def read_blocks(
    stored: StoredArrays, names: Iterable[str]
) -> tuple[dict[str, np.ndarray], list[Exception]]:
    """Reads blocks; those that are damaged are left out, and others whose read failed leave the
    error.

    Neighbouring blocks are read by one request. Blocks are read-only.
    """
    there = [name for name in names if _is_there(stored, name)]
    groups = list(_neighbours(stored, sorted(there, key=lambda name: stored.places[name])))

    def read(group: list[str]) -> tuple[dict[str, np.ndarray], Exception | None]:
        first, last = stored.places[group[0]], stored.places[group[-1]]
        end = last.offset + stored.num_bytes(group[-1])
        try:
            content = read_range(stored.folder / first.file, first.offset, end)
        except (OSError, ConfigError, TrainingError) as error:
            is_damage = isinstance(error, OSError) and error.errno in DAMAGED
            return {}, None if is_damage or type(error) is FileNotFoundError else error
        read_of_group = {}
        for name in group:
            begin = stored.places[name].offset - first.offset
            data = memoryview(content)[begin : begin + stored.num_bytes(name)]
            if (
                len(data) == stored.num_bytes(name)
                and zlib.crc32(data) == stored.places[name].checksum
            ):
                array, spans = block_of(name)
                read_of_group[name] = np.frombuffer(
                    data, np.dtype(stored.forms[array].dtype)
                ).reshape(sides(spans))
        return read_of_group, None

    results = in_threads(read, groups, THREADS)
    blocks = {name: block for read_of_group, _ in results for name, block in read_of_group.items()}
    return blocks, [error for _, error in results if error is not None]


def _is_there(stored: StoredArrays, name: str) -> bool:
    """Returns whether a block's file is there and long enough."""
    place = stored.places[name]
    return place.offset + stored.num_bytes(name) <= stored.sizes.get(place.file, 0)


def _neighbours(stored: StoredArrays, names: Sequence[str]) -> Iterator[list[str]]:
    """Groups blocks, sorted by their places, that one request reads."""
    group: list[str] = []
    for name in names:
        if group:
            first, before, place = (stored.places[member] for member in (group[0], group[-1], name))
            end = place.offset + stored.num_bytes(name)
            gap = place.offset - before.offset - stored.num_bytes(group[-1])
            if place.file != first.file or gap or end - first.offset > _MOST_READ:
                yield group
                group = []
        group.append(name)
    if group:
        yield group


def missing_array(forms: Sequence[ArrayForm], names: Iterable[str]) -> str | None:
    """Returns the name of an array not covered by the blocks, or None."""
    covered = [0] * len(forms)
    for array, spans in map(block_of, names):
        covered[array] += math.prod(sides(spans))
    return next(
        (
            form.name
            for form, size in zip(forms, covered, strict=True)
            if size != math.prod(form.shape)
        ),
        None,
    )
