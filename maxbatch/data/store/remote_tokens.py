"""The tokens of a store in an object store, read by range: a host reads the rows that it trains on and little more."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxbatch.system.remote_path import RemotePath

# Ranges that are closer than this are read as one: a request costs as much as reading so many bytes.
_GAP_BYTES = 16 << 10
_LONGEST_BYTES = 8 << 20  # of one request
_MAX_REQUESTS = 16  # at the same time


class RemoteTokens:
    """An array of tokens in an object, of which slices and lists of places are read when they are asked for."""

    def __init__(self, path: RemotePath, dtype: str, size: int) -> None:
        self._path, self.dtype, self._size = path, np.dtype(dtype), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: Any) -> np.ndarray:
        if isinstance(places, slice):
            begin, end, step = places.indices(self._size)
            if step != 1:
                raise IndexError("a slice of remote tokens has no step")
            return self._read([(begin, max(begin, end))])
        wanted = np.asarray(places)
        if wanted.dtype == bool or not wanted.size:
            return self._read([]) if not wanted.size else self[np.flatnonzero(wanted)]
        return self._gather(np.where(wanted < 0, wanted + self._size, wanted).astype(np.int64))

    def _gather(self, wanted: np.ndarray) -> np.ndarray:
        places, inverse = np.unique(wanted, return_inverse=True)
        gap = _GAP_BYTES // self.dtype.itemsize
        starts = np.flatnonzero(np.diff(places, prepend=places[0] - gap - 2) > gap + 1)
        ends = np.append(starts[1:], len(places)) - 1
        ranges = list(zip(places[starts].tolist(), (places[ends] + 1).tolist(), strict=True))
        read = self._read(ranges)
        # Where each range begins in what was read, less where it begins in the store.
        lengths = np.array([end - begin for begin, end in ranges])
        shift = np.cumsum(lengths) - lengths - np.array([begin for begin, _ in ranges])
        return read[(places + np.repeat(shift, ends - starts + 1))[inverse]].reshape(wanted.shape)

    def _read(self, ranges: list[tuple[int, int]]) -> np.ndarray:
        longest = _LONGEST_BYTES // self.dtype.itemsize
        parts = [(at, min(at + longest, end)) for begin, end in ranges for at in range(begin, end, longest)]
        found = map(self._read_one, parts) if len(parts) <= 1 else _readers().map(self._read_one, parts)
        return np.concatenate([np.zeros(0, self.dtype), *found])

    def _read_one(self, part: tuple[int, int]) -> np.ndarray:
        begin, end = (place * self.dtype.itemsize for place in part)
        return np.frombuffer(self._path.read_range(begin, end), self.dtype)


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="maxbatch-tokens")
