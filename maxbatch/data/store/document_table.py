"""The places where documents of a store begin and end: an array, a mapped file, or a file of an
object store.

The table of a large store is too large for a host: fifty million documents take 400 MB. On a disk
such a table is mapped and searched. In an object store blocks are read when a row needs them. A
block is found by interpolation between the blocks read before, since documents of a store have
similar lengths, and recent blocks are kept, so that a row costs at most one request more.

The bytes read are compared with the hashes of the store's blocks (`maxbatch.data.store.blocks`),
and the starts checked for their order and their ends. The checksum covers the whole file, and is
compared in a pass over all blocks.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from maxbatch.data.store.blocks import Blocks, MappedFile
from maxbatch.data.store.ranged_tokens import readers
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.bounded import RefusedContent
from maxbatch.system.storage.npy import NpyHeader, npy_header
from maxbatch.system.storage.storage import AnyPath, read_range

WHOLE_BYTES = 64 << 20  # a table up to this size is read whole, and is an array
# of a table in an object store, 64 KiB: a request costs as much as reading this many bytes
BLOCK_DOCUMENTS = 8192
LOCAL_BLOCK_DOCUMENTS = 256
_RUN_DOCUMENTS = 1 << 18  # of a pass over a table of this machine
KEPT_BYTES = 64 << 20  # of blocks
_MOST_MARKS = 1 << 16
_INTERPOLATIONS = 3  # steps of a search before every second one bisects
_HEADER_BYTES = 128  # of a file that numpy writes, at least
_BLOCKS_OF_A_PASS = 64  # blocks that a pass over the table reads by one request, 4 MiB
_REQUESTS_OF_A_PASS = 8  # at the same time

_STATE_OF_RANGED = ("_path", "_num_documents", "_num_tokens", "_hashes", "_checksum", "_header")

T = TypeVar("T")


class BlockTable(Protocol):
    """The starts of documents in the order of the store; document d is tokens starts(d) to starts(d
    + 1) - 1.

    Blocks of `block_documents` documents are read in memory that does not grow with their number.
    """

    def containing(self, tokens_n: np.ndarray) -> np.ndarray:
        """Returns, for each token, the number of the last document that begins at or before it."""

    def starts(self, documents_n: np.ndarray) -> np.ndarray:
        """Returns the first token of each document; of the number after the last one, the token
        after all.
        """

    @property
    def block_documents(self) -> int: ...

    def blocks(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Returns of each block the starts of its documents and of the one after them."""

    def runs(self) -> Iterator[np.ndarray]:
        """Yields the starts of all documents, some blocks at a time, and with each run the start
        after its last.

        Raises:
          ConfigError: the table is damaged.
        """


class LocalTable(ABC):
    """A `BlockTable` on this machine, where reading a start costs little."""

    block_documents = LOCAL_BLOCK_DOCUMENTS

    def __init__(self, num_documents: int) -> None:
        self._num_documents = num_documents

    @abstractmethod
    def starts(self, documents_n: np.ndarray) -> np.ndarray: ...

    def containing(self, tokens_n: np.ndarray) -> np.ndarray:
        low_n = np.zeros(tokens_n.shape, np.int64)
        high_n = np.full(tokens_n.shape, self._num_documents)
        # document low begins at or before the token, high behind it
        for _ in range(self._num_documents.bit_length()):
            middle_n = (low_n + high_n) // 2
            is_before_n = self.starts(middle_n) <= tokens_n
            low_n, high_n = (
                np.where(is_before_n, middle_n, low_n),
                np.where(is_before_n, high_n, middle_n),
            )
        return low_n

    def blocks(self, numbers: Sequence[int]) -> list[np.ndarray]:
        return [
            self._starts(number * self.block_documents, self.block_documents) for number in numbers
        ]

    def runs(self) -> Iterator[np.ndarray]:
        for first in range(0, self._num_documents, _RUN_DOCUMENTS):
            yield self._starts(first, _RUN_DOCUMENTS)

    def _starts(self, first: int, count: int) -> np.ndarray:
        return self.starts(np.arange(first, min(first + count, self._num_documents) + 1))


class WholeTable(LocalTable):
    """A table in memory, or mapped.

    Args:
      offsets: int64[documents + 1].
    """

    def __init__(self, offsets: np.ndarray) -> None:
        super().__init__(len(offsets) - 1)
        self._offsets = offsets

    def containing(self, tokens_n: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._offsets, tokens_n, side="right") - 1

    def starts(self, documents_n: np.ndarray) -> np.ndarray:
        array: np.ndarray = self._offsets[documents_n]
        return array


class MappedTable(LocalTable):
    """A mapped file in numpy's format; every part that is read is checked.

    Args:
      blocks: the hashes with which it is compared; None for a store without hashes.

    Raises:
      ConfigError: the file is no such table.
    """

    def __init__(
        self, path: Path, size: int, num_documents: int, num_tokens: int, blocks: Blocks | None
    ) -> None:
        super().__init__(num_documents)
        self._path, self._num_tokens, self._has_hashes = path, num_tokens, blocks is not None
        header = _header(path, read_range(path, 0, _HEADER_BYTES), num_documents)
        self._skipped = header.offset // 8
        self._file = MappedFile(path, np.dtype("<i8"), size, blocks)
        ends = self._file[np.array([0, num_documents]) + self._skipped]
        if ends.tolist() != [0, num_tokens]:
            raise _damaged(
                path, f"it goes from token {ends[0]} to {ends[1]}, and the store has {num_tokens}"
            )

    def check(self) -> None:
        """Compares the whole table with its hashes; raises ConfigError if a block differs."""
        self._file.check()

    def starts(self, documents_n: np.ndarray) -> np.ndarray:
        starts_n = self._file[documents_n + self._skipped]
        if not self._has_hashes:
            in_order = starts_n.ravel()[np.argsort(documents_n, axis=None, kind="stable")]
            if (np.diff(in_order, prepend=0, append=self._num_tokens) < 0).any():
                raise _damaged(
                    self._path,
                    f"documents {documents_n.min()} to {documents_n.max()} are not in order",
                )
        return starts_n


class RangedTable:
    """A table in an object store, in numpy's file format.

    Args:
      blocks: the hashes with which it is compared; None for a store without hashes.
      checksum: the CRC-32 of the file.

    Raises:
      ConfigError: the file is no such table.
    """

    def __init__(
        self,
        path: AnyPath,
        num_documents: int,
        num_tokens: int,
        blocks: Blocks | None,
        checksum: int,
    ) -> None:
        self._path, self._num_documents, self._num_tokens, self._hashes = (
            path,
            num_documents,
            num_tokens,
            blocks,
        )
        self._checksum = checksum
        self._header = self._checked_header()
        self._open()
        last = np.frombuffer(self._read_range(*self._bytes(num_documents, num_documents)), "<i8")
        if last[0] != num_tokens:
            raise self._damaged(f"it ends at token {last[0]}, and the store has {num_tokens}")

    def _checked_header(self) -> bytes:
        content = self._read_range(0, _HEADER_BYTES)
        return content[: _header(self._path, content, self._num_documents).offset]

    def _read_range(self, begin: int, end: int) -> bytes:
        if self._hashes:
            return self._hashes.read_range(self._path.name, begin, end)
        return read_range(self._path, begin, end)

    def _open(self) -> None:
        self._lock = threading.Lock()
        # the one used last at the end
        self._blocks: OrderedDict[int, Future[np.ndarray]] = OrderedDict()
        # starts that are known, with their documents
        self._marks = [(0, 0), (self._num_tokens, self._num_documents)]

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in _STATE_OF_RANGED}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()

    def containing(self, tokens_n: np.ndarray) -> np.ndarray:
        tokens, inverse = np.unique(tokens_n, return_inverse=True)
        documents = self._at_once(self._find, tokens.tolist())
        return np.array(documents, np.int64)[inverse].reshape(tokens_n.shape)

    def starts(self, documents_n: np.ndarray) -> np.ndarray:
        number_n = np.minimum(documents_n, self._num_documents - 1) // BLOCK_DOCUMENTS
        numbers = np.unique(number_n).tolist()
        starts_n = np.empty(documents_n.shape, np.int64)
        for number, block in zip(numbers, self.blocks(numbers), strict=True):
            is_here_n = number_n == number
            starts_n[is_here_n] = block[documents_n[is_here_n] - number * BLOCK_DOCUMENTS]
        return starts_n

    @property
    def block_documents(self) -> int:
        return BLOCK_DOCUMENTS

    def blocks(self, numbers: Sequence[int]) -> list[np.ndarray]:
        return self._at_once(self._block, numbers)

    def runs(self) -> Iterator[np.ndarray]:
        step = _BLOCKS_OF_A_PASS * BLOCK_DOCUMENTS
        # The last start of a request is the first one of the next: it is counted once.
        checksum, end = zlib.crc32(self._header), b""
        for starts in self._read_ahead(range(0, self._num_documents, step)):
            checksum, end = zlib.crc32(starts[:-1].data, checksum), starts[-1:].tobytes()
            for first in range(0, len(starts) - 1, BLOCK_DOCUMENTS):
                yield starts[first : first + BLOCK_DOCUMENTS + 1]
        if zlib.crc32(end, checksum) != self._checksum:
            raise self._damaged("it differs from its checksum")

    def _read_ahead(self, firsts: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the starts of documents from each of `firsts` to the next one, that one
        included.
        """
        waiting: deque[Future[np.ndarray]] = deque()
        for first, after in itertools.pairwise([*firsts, self._num_documents]):
            waiting.append(readers().submit(self._starts, first, after))
            if len(waiting) == _REQUESTS_OF_A_PASS:
                yield waiting.popleft().result()
        for reading in waiting:
            yield reading.result()

    @staticmethod
    def _at_once(read: Callable[[int], T], values: Sequence[int]) -> list[T]:
        return list(readers().map(read, values) if len(values) > 1 else map(read, values))

    def _find(self, token: int) -> int:
        """Returns the last document that begins at or before a token of the store."""
        # The nearest known starts around the token bound the search.
        with self._lock:
            place = bisect_right(self._marks, (token, self._num_documents + 1))
            (low, first), (high, end) = self._marks[place - 1], self._marks[place]

        # Interpolate, since documents are about equally long; halving bounds the steps elsewhere.
        steps = 0
        while True:
            steps += 1
            is_halved = steps > _INTERPOLATIONS and steps % 2
            share = (
                (end - first) // 2 if is_halved else (token - low) * (end - first) // (high - low)
            )
            number = (first + share) // BLOCK_DOCUMENTS
            block = self._block(number)
            if token < block[0]:
                high, end = int(block[0]), number * BLOCK_DOCUMENTS
            elif token >= block[-1]:
                low, first = int(block[-1]), (number + 1) * BLOCK_DOCUMENTS
            else:
                return (
                    number * BLOCK_DOCUMENTS + int(np.searchsorted(block, token, side="right")) - 1
                )

    def _block(self, number: int) -> np.ndarray:
        """Returns the starts of a block's documents and of the one after them, which many threads
        may ask for.
        """
        with self._lock:
            is_new = number not in self._blocks
            block = self._blocks.setdefault(number, Future())
            self._blocks.move_to_end(number)
            while len(self._blocks) > max(1, KEPT_BYTES // (8 * BLOCK_DOCUMENTS)):
                self._blocks.popitem(last=False)
        # One thread reads the block; those that ask meanwhile wait for its future.
        if is_new:
            try:
                block.set_result(self._read(number))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(number, None)  # the next one who asks tries again
                block.set_exception(error)
        return block.result()

    def _read(self, number: int) -> np.ndarray:
        first = number * BLOCK_DOCUMENTS
        last = min(first + BLOCK_DOCUMENTS, self._num_documents)
        block = self._starts(first, last)
        with self._lock:
            for mark in ((int(block[0]), first), (int(block[-1]), last)):
                place = bisect_right(self._marks, mark)
                if self._marks[place - 1] != mark and len(self._marks) < _MOST_MARKS:
                    insort(self._marks, mark)
        return block

    def _starts(self, first: int, last: int) -> np.ndarray:
        """Reads the starts of documents `first` to `last`, by one request."""
        starts = np.frombuffer(self._read_range(*self._bytes(first, last)), "<i8")
        if starts[0] < 0 or starts[-1] > self._num_tokens or (np.diff(starts) < 0).any():
            raise self._damaged(f"documents {first} to {last} are not in order")
        return starts

    def _damaged(self, problem: str) -> ConfigError:
        return _damaged(self._path, problem)

    def _bytes(self, first: int, last: int) -> tuple[int, int]:
        """Returns the bytes of the file that hold the starts of documents `first` to `last`."""
        begin = len(self._header)
        return begin + 8 * first, begin + 8 * (last + 1)


def _header(path: AnyPath, content: bytes, num_documents: int) -> NpyHeader:
    """Returns the header of a table; raises ConfigError if the number of documents does not fit."""
    try:
        header = npy_header(content, "its header")
    except RefusedContent as error:
        raise _damaged(path, str(error)) from None
    if header.size != num_documents + 1 or header.dtype != np.int64:
        raise _damaged(path, f"it has {header.size} numbers of {header.dtype}")
    return header


def _damaged(path: AnyPath, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}: the table of documents cannot be used: {problem}; prepare the store again"
    )
