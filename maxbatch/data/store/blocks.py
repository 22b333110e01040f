"""Hashes of blocks in a store's files, made with the store and checked on reading.

`blocks.bin` holds a 32-bit hash of every 128 bytes of the files of tokens and of `offsets.npy`,
file after file in the order of the manifest; each file begins a new block, and its last block is
filled with zeros. Blocks are small because a row of a shuffled stream is a few kilobytes, and a
store in a bucket is read in whole blocks: a range of 2 KiB grows by 6% on average, not at all if
rows begin at blocks, and its hashes are 3% of it.

The hash is multilinear (Lemire and Kaser 2014, "Strongly universal string hashing is fast"): the
upper half of the sum of the block's 32-bit words times fixed random 64-bit numbers, so that two
given blocks agree with probability 2^-32. It is masked by the block's number and the store's
content hash, so that swapped blocks, and blocks from another store with their hashes, differ. It
guards against damage, not against forgery.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, read_range

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCKS = "blocks.bin"
BLOCK_BYTES = 128
WHOLE_BYTES = 64 << 20  # hashes in an object store up to this size are read whole, on first use
CHUNK_BYTES = 64 << 10  # of a local file, checked together
_HASH = np.dtype("<u4")
_AT_ONCE_BYTES = 256 << 10  # small enough for the processor's cache
_WEIGHTS = np.frombuffer(hashlib.shake_256(b"maxbatch blocks").digest(2 * BLOCK_BYTES), "<u8")
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def num_blocks(size: int) -> int:
    """Returns the blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


def block_hashes(data: bytes | memoryview | np.ndarray) -> np.ndarray:
    """Returns the hashes (uint32 [blocks], not masked) of a buffer, the last block filled with
    zeros.
    """
    data_n = np.frombuffer(data, np.uint8)
    hashes = np.empty(num_blocks(len(data_n)), _HASH)
    for begin in range(0, len(data_n), _AT_ONCE_BYTES):
        some = data_n[begin : begin + _AT_ONCE_BYTES]
        if missing := -len(some) % BLOCK_BYTES:
            some = np.concatenate([some, np.zeros(missing, np.uint8)])
        words = some.view("<u4").reshape(-1, BLOCK_BYTES // 4)
        first = begin // BLOCK_BYTES
        hashes[first : first + len(words)] = words.astype(np.uint64) @ _WEIGHTS >> np.uint64(32)
    return hashes


def masks(content: str, first: int, count: int) -> np.ndarray:
    """Returns the mask of the hashes of blocks `first` to `first + count - 1` (uint32) of a store
    with this content.
    """
    seed = np.frombuffer(hashlib.blake2b(content.encode(), digest_size=8).digest(), "<u8")[0]
    mixed = (np.arange(first, first + count, dtype=np.uint64) ^ seed) * _MIX[0]
    mixed = (mixed ^ mixed >> np.uint64(32)) * _MIX[1]
    array: np.ndarray = (mixed >> np.uint64(32)).astype(_HASH)
    return array


class BlockHasher:
    """A hasher of a file written in parts.

    Args:
      take: called with the hashes (uint32, not masked) of the next blocks.
    """

    def __init__(self, take: Callable[[np.ndarray], object]) -> None:
        self._take = take
        self._rest = b""

    def update(self, data: Buffer) -> None:
        """Adds the next bytes of the file."""
        view = memoryview(data).cast("B")
        if self._rest:
            size = min(len(view), BLOCK_BYTES - len(self._rest))
            self._rest, view = self._rest + bytes(view[:size]), view[size:]
            if len(self._rest) < BLOCK_BYTES:
                return
            self._take(block_hashes(self._rest))
        whole = len(view) - len(view) % BLOCK_BYTES
        if whole:
            self._take(block_hashes(view[:whole]))
        self._rest = bytes(view[whole:])

    def finish(self) -> None:
        """Takes the end of the file, which fills no block."""
        if self._rest:
            self._take(block_hashes(self._rest))


class Blocks:
    """The hashes of a store's blocks, for checking reads of its files.

    Args:
      sizes: bytes of each file with hashes, in the order of the hashes.
    """

    def __init__(self, folder: AnyPath, content: str, sizes: Mapping[str, int]) -> None:
        self._folder, self._content, self._sizes = folder, content, dict(sizes)
        ends = list(accumulate(map(num_blocks, sizes.values())))
        self._first = dict(zip(sizes, [0, *ends[:-1]], strict=True))
        self._total = ends[-1]
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self._folder, "content": self._content, "sizes": self._sizes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def num_bytes(self) -> int:
        return self._total * _HASH.itemsize

    def check(self, name: str, begin: int, data: bytes | memoryview | np.ndarray) -> None:
        """Checks bytes of a file from `begin`, a block's beginning, to the end of a block or of the
        file.

        Raises:
          ConfigError: a block differs from its hash.
        """
        number = begin // BLOCK_BYTES
        hashes = block_hashes(data)
        first = self._first[name] + number
        expected = self._stored(first, first + len(hashes)) ^ masks(
            self._content, first, len(hashes)
        )
        differs = hashes != expected
        if differs.any():
            block = number + int(np.argmax(differs))
            raise damaged_file(
                self._folder / name,
                f"block {block} (bytes {block * BLOCK_BYTES} on) differs from its hash in {BLOCKS}",
            )

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Returns bytes `begin` to `end - 1` of a file in an object store; reads and checks whole
        blocks.
        """
        path = self._folder / name
        low = begin // BLOCK_BYTES * BLOCK_BYTES
        high = min(num_blocks(end) * BLOCK_BYTES, self._sizes[name])
        data = read_range(path, low, high)
        if len(data) != high - low:
            raise damaged_file(path, f"bytes {low} to {high} are cut short: {len(data)} were read")
        self.check(name, low, data)
        return data[begin - low : end - low]

    def _stored(self, first: int, end: int) -> np.ndarray:
        path = self._folder / BLOCKS
        if isinstance(path, Path):
            with self._lock:
                return self._mapped[first:end]
        if self.num_bytes > WHOLE_BYTES:
            data = read_range(path, first * _HASH.itemsize, end * _HASH.itemsize)
            if len(data) != (end - first) * _HASH.itemsize:
                raise damaged_file(path, "it is cut short")
            return np.frombuffer(data, _HASH)
        with self._lock:
            return self._whole[first:end]

    @cached_property
    def _mapped(self) -> MappedFile:
        return MappedFile(Path(str(self._folder / BLOCKS)), _HASH, self.num_bytes, None)

    @cached_property
    def _whole(self) -> np.ndarray:
        path = self._folder / BLOCKS
        hashes = np.frombuffer(path.read_bytes(), np.uint8)
        if len(hashes) != self.num_bytes:
            raise damaged_file(
                path, f"it has {len(hashes)} bytes, and its hashes need {self.num_bytes}"
            )
        return hashes.view(_HASH)


class MappedFile:
    """The array in a local file, memory-mapped; parts are checked on first read per process, 64 KiB
    at a time.

    Args:
      blocks: its hashes; None if the store has none.
    """

    def __init__(self, path: Path, dtype: np.dtype, size: int, blocks: Blocks | None) -> None:
        self._path, self._size, self._blocks = path, size, blocks
        with open(path, "rb") as file:
            self._refuse_shrunk(os.fstat(file.fileno()).st_size)
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._array = np.frombuffer(self._map, dtype)
        self._shift = (CHUNK_BYTES // dtype.itemsize).bit_length() - 1
        self._is_checked = np.zeros(-(-size // CHUNK_BYTES), bool)
        self._is_whole = blocks is None  # nothing is left to check

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        """Returns the values at some indices, each at least 0.

        Raises:
          ConfigError: a block of one differs from its hash, or the file has shrunk.
        """
        self._refuse_shrunk(self._map.size())
        if not self._is_whole:
            self._check(self._chunks(places))
        return self._array[places]

    def check(self) -> None:
        """Compares the whole file with its hashes, also the parts that were checked before.

        Raises:
          ConfigError: a block differs from its hash, or the file has shrunk.
        """
        assert self._blocks is not None, "the store has no hashes"
        self._refuse_shrunk(self._map.size())
        data = self._array.view(np.uint8)
        for begin in range(0, self._size, _AT_ONCE_BYTES):
            self._blocks.check(self._path.name, begin, data[begin : begin + _AT_ONCE_BYTES])

    def _chunks(self, places: np.ndarray | slice) -> np.ndarray:
        if isinstance(places, slice):
            begin, end, _ = places.indices(len(self._array))
            return np.arange(
                begin >> self._shift, ((end - 1) >> self._shift) + 1 if end > begin else 0
            )
        return places >> self._shift

    def _check(self, chunks: np.ndarray) -> None:
        assert self._blocks is not None, "without hashes, nothing is left to check"
        is_checked = self._is_checked[chunks]
        if is_checked.all():
            return
        data = self._array.view(np.uint8)
        for chunk in np.unique(chunks[~is_checked]).tolist():
            begin = chunk * CHUNK_BYTES
            self._blocks.check(self._path.name, begin, data[begin : begin + CHUNK_BYTES])
            self._is_checked[chunk] = True
        self._is_whole = bool(self._is_checked.all())

    def _refuse_shrunk(self, size: int) -> None:
        """Raises ConfigError if the file has shrunk; reading a map past its end would kill the
        process.
        """
        if size < self._size:
            block = size // BLOCK_BYTES
            raise damaged_file(
                self._path,
                f"it is cut short in block {block}: {size} bytes of {self._size} are left",
            )


def damaged_file(path: AnyPath, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}: the tokenised data cannot be used: {problem}; remove the folder, and prepare "
        "them again"
    )
