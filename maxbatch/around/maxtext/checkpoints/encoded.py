"""Chunks as they are encoded in a checkpoint, decoded from their beginning on, so that none need be
whole in memory.

Orbax stores the values of a chunk in C order, as one zstd frame or as they are. In zarr 2 each is
the value of a key; in zarr 3 it is a range of one, which an index at its end states
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

zstandard: Any = None
with contextlib.suppress(ImportError):  # chunks that zstd compressed are then read whole
    zstandard = importlib.import_module("zstandard")

_IN_FLIGHT = 4  # ranges that are requested at a time
_LEAST_RANGE = 64 << 10  # bytes
_INDEX_ENTRY = 16  # bytes: where a chunk begins, and its size
_INDEX_SUM = 4  # bytes of the checksum after the index
_NO_CHUNK = (1 << 64) - 1  # in the index: all values are the fill value

Fill = Callable[[np.ndarray], None]


class Encoding(NamedTuple):
    """How the chunks of an array are stored."""

    store: Any  # tensorstore.KvStore that holds its keys
    prefix: tuple[str, ...]  # of a key
    separator: str
    is_compressed: bool
    chunks_per_key: tuple[int, ...]  # along each axis
    has_index: bool  # whether a key holds chunks and their index

    def open(self, chunk: tuple[int, ...], num_bytes: int, ahead_bytes: int) -> Fill | None:
        """Returns a function that fills one array after the other with a chunk's values, from the
        first on; None for a chunk that is not stored.

        Args:
          chunk: its number along each axis.
          num_bytes: of its values.
          ahead_bytes: how much of it is requested before it is needed.
        """
        numbers = [number // of for number, of in zip(chunk, self.chunks_per_key, strict=True)]
        key = self.separator.join([*self.prefix, *map(str, numbers)]) or "0"
        span = self._in_index(key, chunk) if self.has_index else self._of_key(key, num_bytes)
        if span is None:
            return None
        ranges = _Ranges(self.store, key, *span, ahead_bytes)
        if not self.is_compressed:
            return _filling(lambda memory: _copied(ranges.read(len(memory)), memory))
        decompressor = zstandard.ZstdDecompressor()
        return _filling(decompressor.stream_reader(ranges, read_across_frames=True).readinto)

    def _in_index(self, key: str, chunk: tuple[int, ...]) -> tuple[int, int] | None:
        size = math.prod(self.chunks_per_key) * _INDEX_ENTRY + _INDEX_SUM
        index = self.store.read(key, byte_range=slice(-size, None)).result()
        if index.state == "missing":
            return None
        entries = np.frombuffer(index.value[:-_INDEX_SUM], "<u8").reshape(-1, 2)
        inside = [number % of for number, of in zip(chunk, self.chunks_per_key, strict=True)]
        begin, length = (
            int(value) for value in entries.reshape(*self.chunks_per_key, 2)[tuple(inside)]
        )
        return None if begin == _NO_CHUNK else (begin, begin + length)

    def _of_key(self, key: str, num_bytes: int) -> tuple[int, int] | None:
        """Returns the beginning and the end of a whole value; TensorStore states no sizes."""
        if self.store.read(key, byte_range=slice(0, 0)).result().state == "missing":
            return None
        if not self.is_compressed:
            return 0, num_bytes
        # zstd adds less to what it cannot compress
        size, too_large = 0, num_bytes + num_bytes // 128 + 1024
        while too_large - size > 1:
            middle = (size + too_large) // 2
            if self._reaches(key, middle):
                size = middle
            else:
                too_large = middle
        return 0, size

    def _reaches(self, key: str, size: int) -> bool:
        try:
            self.store.read(key, byte_range=slice(size, size)).result()
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            return False
        return True


def encoding_of(store: Any) -> Encoding | None:
    """Returns how the chunks of a `tensorstore.TensorStore` are stored; None for a form that only
    TensorStore reads.
    """
    spec = store.spec().to_json()
    metadata = spec["metadata"]
    if spec["driver"] == "zarr":
        dtype, compressor = metadata["dtype"], metadata["compressor"]
        is_plain = metadata["order"] == "C" and not metadata["filters"]
        if not is_plain or not isinstance(dtype, str) or dtype.startswith(">"):
            return None
        if compressor is not None and (compressor["id"] != "zstd" or zstandard is None):
            return None
        ones, separator = (1,) * len(store.shape), metadata["dimension_separator"]
        return Encoding(store.kvstore, (), separator, compressor is not None, ones, False)
    key_encoding = metadata["chunk_key_encoding"]
    if key_encoding["name"] != "default":
        return None
    separator = key_encoding.get("configuration", {}).get("separator", "/")
    per_key = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    codecs, sides, has_index = metadata["codecs"], per_key, False
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        sharding = codecs[0]["configuration"]
        index = [codec["name"] for codec in sharding["index_codecs"]]
        if index != ["bytes", "crc32c"] or sharding.get("index_location", "end") != "end":
            return None
        codecs, sides, has_index = sharding["codecs"], sharding["chunk_shape"], True
    is_compressed = _compresses(codecs)
    if is_compressed is None:
        return None
    counts = tuple(size // side for size, side in zip(per_key, sides, strict=True))
    return Encoding(store.kvstore, ("c",), separator, is_compressed, counts, has_index)


def _compresses(codecs: list[Mapping[str, Any]]) -> bool | None:
    """Returns whether codecs of zarr 3 compress by zstd; None for others."""
    names = [codec["name"] for codec in codecs]
    endian = codecs[0].get("configuration", {}).get("endian", "little") if codecs else ""
    if endian != "little" or names not in (["bytes"], ["bytes", "zstd"]):
        return None
    if names[1:] and zstandard is None:
        return None
    return bool(names[1:])


class _Ranges:
    """A range of a value's bytes as a file that requests its next ranges ahead."""

    def __init__(self, store: Any, key: str, begin: int, end: int, ahead_bytes: int) -> None:
        self._store, self._key = store, key
        self._next, self._end = begin, end
        self._step = max(_LEAST_RANGE, ahead_bytes // _IN_FLIGHT)
        self._coming: deque[Any] = deque()
        self._here = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """Returns at most as many bytes, at least one; none at the end."""
        while len(self._coming) < _IN_FLIGHT and self._next < self._end:
            last = min(self._next + self._step, self._end)
            self._coming.append(self._store.read(self._key, byte_range=slice(self._next, last)))
            self._next = last
        if not self._here and self._coming:
            self._here = memoryview(self._coming.popleft().result().value)
        size = len(self._here) if size < 0 else size
        part, self._here = bytes(self._here[:size]), self._here[size:]
        return part


def _copied(part: bytes, memory: memoryview) -> int:
    memory[: len(part)] = part
    return len(part)


def _filling(read_into: Callable[[memoryview], int]) -> Fill:
    def fill(values: np.ndarray) -> None:
        memory = values.reshape(-1).view(np.uint8).data
        while memory:
            read = read_into(memory)
            if not read:
                raise ValueError("a chunk ends early")
            memory = memory[read:]

    return fill
