"""Best-fit packing: documents packed into rows so that few are cut and few slots stay empty.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830): a document
longer than a row is cut every L tokens, and only there. The pieces, the longest first, go into the
row with the least free space that holds them, or else open a new row.

The choice depends only on lengths, so pieces of one length and rows of one free space are handled
as groups. The rows with the least free space f >= l take floor(f / l) pieces of length l each
before any other row does, and then have less than l left. So each length meets each free space at
most once, and packing takes O(min(L, P)) group operations over arrays, for any number of documents.

The order of rows and pieces follows the dataset, not the length: rows are in the order of the
pieces that opened them, and the pieces of a row in their own order. Otherwise a stream without
shuffle would train on long documents first and on the shortest pieces last. Pieces of one length
may be taken in any order. They are taken from all over the dataset: in its order, the last ones
would open the last rows.

Legend: L row length, P pieces, n rows asked for, S documents of the split, R rows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxbatch.data.store.cache_folder import cache_file, writing_cache
from maxbatch.data.stream.rows import Extents, Pieces
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.atomic_files import remove_leftovers, writing_atomically
from maxbatch.system.storage.bounded import read_json
from maxbatch.system.storage.contents import content_stamp
from maxbatch.system.storage.watched_files import watch

_VERSION = 2
_HEADER_BYTES = 4096
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: its multiples spread evenly


class Packing(NamedTuple):
    """Pieces by row: row r is pieces first_piece[r] to first_piece[r + 1] - 1."""

    first_piece: np.ndarray  # int64[R + 1]
    start_P: np.ndarray  # int64, index of the piece's first token in the store
    length_P: np.ndarray  # int32, tokens, 1 to L


_DTYPES = ("<i8", "<i8", "<i4")  # types of a Packing's arrays in a file


def best_fit(extents: Extents, row_length: int) -> Packing:
    """Packs documents, in the order of the store."""
    start_P, length_P = _cut(*extents, row_length)
    row_P, num_rows = fit(length_P, row_length)
    order = _stable_order(row_P, num_rows)
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=num_rows))])
    return Packing(first_piece, start_P[order], length_P[order])


def _cut(start_S: np.ndarray, end_S: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns start (int64) and length (int32) of each document's pieces, in the order of the
    dataset.
    """
    # In place, since each of these arrays may be the largest of the build.
    count_S = -(-(end_S - start_S) // row_length)
    first_S = np.cumsum(count_S) - count_S
    place_P = np.arange(int(count_S.sum()))
    place_P -= np.repeat(first_S, count_S)
    place_P *= row_length
    place_P += np.repeat(start_S, count_S)
    left_P = np.repeat(end_S, count_S)
    left_P -= place_P
    return place_P, np.minimum(left_P, row_length, out=left_P).astype(np.int32)


def fit(length_P: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """Returns the row of each piece, of 1 to L tokens, and the number of rows.

    Rows are numbered in the order of the pieces that opened them.
    """
    # Pieces in an order that spreads them over the dataset, sorted by length. Arrays are dropped as
    # soon as they are used: there may be billions of pieces.
    keys_P = np.arange(len(length_P), dtype=np.uint64)
    keys_P *= _GOLDEN
    keys_P >>= np.uint64(48)
    spread = _stable_order(keys_P.astype(np.uint16), 1 << 16)
    del keys_P
    by_length = spread[_stable_order(length_P[spread], row_length + 1)]
    del spread

    count_of_length = np.bincount(length_P, minlength=row_length + 1)
    end_of_length = np.cumsum(count_of_length).tolist()
    rows = _Rows(len(length_P), row_length)
    for length in reversed(np.flatnonzero(count_of_length).tolist()):
        rows.place(by_length[end_of_length[length - 1] : end_of_length[length]], length)
    opener_R = np.concatenate([by_length[:0], *rows.openers])
    rank_R = np.empty(len(opener_R), rows.row_P.dtype)
    rank_R[_stable_order(opener_R, len(length_P))] = np.arange(len(opener_R))
    return rank_R[rows.row_P], len(opener_R)


class _Rows:
    """Rows under construction, filled with pieces from long to short."""

    def __init__(self, num_pieces: int, row_length: int):
        self.row_P = np.empty(num_pieces, _index_type(num_pieces))  # the row of each placed piece
        self.openers: list[np.ndarray] = []  # the opening piece of each row, in order
        self._row_length = row_length
        self._num_rows = 0
        self._by_space: dict[int, list[np.ndarray]] = {}  # rows by free space
        # heaps of the free spaces that hold a piece of the present length, and, negated, of the
        # smaller ones
        self._usable: list[int] = []
        self._small: list[int] = []

    def place(self, pieces: np.ndarray, length: int) -> None:
        """Places all pieces of one length; lengths must decrease between calls."""
        while self._small and -self._small[0] >= length:
            heappush(self._usable, -heappop(self._small))
        while len(pieces) and self._usable:
            space = heappop(self._usable)
            pieces = self._fill(np.concatenate(self._by_space.pop(space)), space, pieces, length)
        if len(pieces):
            opener = pieces[:: self._row_length // length]  # a row takes this many of the length
            rows = np.arange(self._num_rows, self._num_rows + len(opener), dtype=self.row_P.dtype)
            self.openers.append(opener)
            self._num_rows += len(rows)
            self._fill(rows, self._row_length, pieces, length)

    def _fill(self, rows: np.ndarray, space: int, pieces: np.ndarray, length: int) -> np.ndarray:
        """Fills rows of equal free space, in order, with pieces of equal length; returns the
        remaining pieces.
        """
        per_row = space // length
        used = min(len(rows), -(-len(pieces) // per_row))
        row_of_piece = np.repeat(rows[:used], per_row)[: len(pieces)]
        self.row_P[pieces[: len(row_of_piece)]] = row_of_piece
        full = len(row_of_piece) // per_row
        # Rows with all pieces that fit, at most one with fewer, and untouched ones.
        for group, free in (
            (rows[:full], space - per_row * length),
            (rows[full:used], space - (len(row_of_piece) - full * per_row) * length),
            (rows[used:], space),
        ):
            if len(group) and free:
                if free not in self._by_space and free >= length:
                    heappush(self._usable, free)
                elif free not in self._by_space:
                    heappush(self._small, -free)
                self._by_space.setdefault(free, []).append(group)
        return pieces[len(row_of_piece) :]


def _index_type(count: int) -> type[np.int32 | np.int64]:
    """Returns the smaller of the types that can number `count` values."""
    return np.int32 if count <= 1 << 31 else np.int64


def _stable_order(keys: np.ndarray, end: int) -> np.ndarray:
    """Returns the stable argsort of keys 0 to end - 1, 16 bits at a time: numpy sorts those in
    linear time.
    """
    kind = _index_type(len(keys))
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable").astype(kind)
    for shift in range(16, max(end - 1, 1).bit_length(), 16):
        digit = (keys >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


class BestFitPlan:
    """A `RowPlan` in a cache file; each process maps its arrays on first use.

    The file is a JSON header padded to 4096 bytes (`version`, `name` of the file, `rows`, `pieces`,
    `tokens`, `row_length`, and the CRC-32 of these and of the rest of the file), then the arrays of
    `Packing`, little-endian, one after the other.
    """

    def __init__(self, path: Path):
        self._stamp = content_stamp(path)
        self._header = header = _checked_header(path)
        self.row_length: int = header["row_length"]
        self.num_rows: int = header["rows"]
        self.num_tokens: int = header["tokens"]
        self._path, self._is_checked = path, True
        self._num_pieces: int = header["pieces"]

    @cached_property
    def _packing(self) -> Packing:
        try:
            if not self._is_checked:
                _checked_header(self._path)
            arrays: list[np.ndarray] = []
            for dtype, size in zip(
                _DTYPES, (self.num_rows + 1, self._num_pieces, self._num_pieces), strict=True
            ):
                begin = _HEADER_BYTES + sum(array.nbytes for array in arrays)
                arrays.append(np.memmap(self._path, dtype, "r", begin, (size,)))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{self._path}: the packing was damaged or removed while in use; start again to "
                "compute it again"
            ) from error
        return Packing(*arrays)

    def watch(self) -> None:
        """Has the run under way watch the file."""
        watch(self._path, self._stamp, self._is_unchanged)

    def _is_unchanged(self) -> bool:
        if self._path.exists() and self._path.stat().st_size < self._stamp[0]:
            return False  # reading a map past its file's end would kill the process
        return bool(
            self._header["crc32"]
            == _checksum(self._header, (array.data for array in self._packing))
        )

    def __getstate__(self) -> dict[str, object]:
        # Worker processes check and map the file themselves.
        return {name: value for name, value in self.__dict__.items() if name != "_packing"} | {
            "_is_checked": False
        }

    def pieces(self, rows_n: np.ndarray) -> Pieces:
        first_piece, start, length = self._packing
        first_n = first_piece[rows_n]
        count_n = first_piece[rows_n + 1] - first_n
        row_P = np.repeat(np.arange(len(rows_n)), count_n)
        before_n = np.cumsum(count_n) - count_n
        piece_P = np.repeat(first_n - before_n, count_n) + np.arange(len(row_P))
        return Pieces(row_P, np.asarray(start[piece_P]), length[piece_P].astype(np.int64))


def _checked_header(path: Path) -> dict[str, Any]:
    """Reads the header of a packing's file; raises ValueError if it is damaged or a copy of another
    file.
    """
    with open(path, "rb") as file:
        header = dict(read_json(file.read(_HEADER_BYTES), path.name, most_depth=1))
        rows, pieces = header["rows"], header["pieces"]
        bytes_of_arrays = sum(
            np.dtype(dtype).itemsize * size
            for dtype, size in zip(_DTYPES, (rows + 1, pieces, pieces), strict=True)
        )
        if path.stat().st_size != _HEADER_BYTES + bytes_of_arrays:
            raise ValueError(f"{path} has another size than its header states")
        checksum = _checksum(header, iter(lambda: file.read(1 << 24), b""))
    if header["version"] != _VERSION or header["name"] != path.name or header["crc32"] != checksum:
        raise ValueError(f"{path} is damaged, or of another version")
    return header


def find_best_fit(
    data_cache_dir: str, row_length: int, key: Mapping[str, object]
) -> BestFitPlan | None:
    """Returns the cached plan of `key`, or None if it is missing or damaged; computes nothing."""
    try:
        return BestFitPlan(_path(data_cache_dir, row_length, key))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def open_best_fit(
    data_cache_dir: str,
    row_length: int,
    key: Mapping[str, object],
    documents: Callable[[], Extents],
) -> BestFitPlan:
    """Returns the plan for `key`, JSON values that determine it together with L.

    Computes it from `documents()` if the cache has no sound plan.
    """
    plan = find_best_fit(data_cache_dir, row_length, key)
    if plan is None:
        path = _path(data_cache_dir, row_length, key)
        with writing_cache(data_cache_dir, path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            _write(path, best_fit(documents(), row_length), row_length)
        plan = BestFitPlan(path)
    plan.watch()
    return plan


def _path(data_cache_dir: str, row_length: int, key: Mapping[str, object]) -> Path:
    return cache_file(data_cache_dir, "packing", [_VERSION, row_length, key])


def _write(path: Path, packing: Packing, row_length: int) -> None:
    """Writes a packing to a file; racing processes write the same content."""
    header = {
        "version": _VERSION,
        "name": path.name,
        "rows": len(packing.first_piece) - 1,
        "pieces": len(packing.start_P),
        "tokens": int(packing.length_P.sum(dtype=np.int64)),
        "row_length": row_length,
    }
    arrays = [
        np.ascontiguousarray(array, dtype).data
        for array, dtype in zip(packing, _DTYPES, strict=True)
    ]
    checksum = _checksum(header, arrays)
    with writing_atomically(path) as file:
        file.write(json.dumps(header | {"crc32": checksum}).encode().ljust(_HEADER_BYTES))
        for array in arrays:
            file.write(array)


def _checksum(header: Mapping[str, object], chunks: Iterable[bytes | memoryview]) -> int:
    facts = {name: value for name, value in header.items() if name != "crc32"}
    checksum = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    return checksum
