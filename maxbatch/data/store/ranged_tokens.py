"""Tokens that are read by range: from the shards of a store on a disk, or from objects, where a host
reads the rows that it trains on and little more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from maxbatch.data.store.blocks import Blocks, MappedFile
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath, is_remote
from maxbatch.system.storage.stores.store import MAX_REQUESTS

# Ranges that are closer than this are read as one: a request costs as much as reading this many
# bytes.
_GAP_BYTES = 16 << 10
# the most bytes between ranges read as one, as long as few of them are wasted
_WIDEST_GAP_BYTES = 1 << 20
_LONGEST_BYTES = 8 << 20  # of one request


class RangedTokens:
    """An array of tokens in one or several files; slices and lists of places are read on access.

    Args:
      sizes: tokens of each file.
      blocks: the hashes with which they are compared; None for a store without hashes.
    """

    def __init__(
        self,
        files: Sequence[AnyPath],
        dtype: str,
        sizes: Sequence[int],
        blocks: Blocks | None = None,
    ) -> None:
        self._files, self.dtype, self._blocks = files, np.dtype(dtype), blocks
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._size = int(self._starts[-1])
        self._maps: dict[int, MappedFile] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: object) -> np.ndarray:
        if isinstance(places, slice):
            begin, end, step = places.indices(self._size)
            if step != 1:
                raise IndexError("a slice of ranged tokens has no step")
            return self._read([(begin, max(begin, end))])
        wanted = np.asarray(places)
        if wanted.dtype == bool or not wanted.size:
            return self._read([]) if not wanted.size else self[np.flatnonzero(wanted)]
        return self._gather(np.where(wanted < 0, wanted + self._size, wanted).astype(np.int64))

    def check(self, name: str) -> None:
        """Compares a file of this machine with its hashes; raises ConfigError if a block
        differs.
        """
        number = [file.name for file in self._files].index(name)
        self._mapped(number, Path(str(self._files[number]))).check()

    def _gather(self, wanted: np.ndarray) -> np.ndarray:
        # Places in order, cut into ranges where the next place is too far to be read along.
        places, inverse = np.unique(wanted, return_inverse=True)
        step_sizes = np.diff(places)
        longest_step = _longest_step(step_sizes[step_sizes > 1], len(places), self.dtype.itemsize)
        starts = np.flatnonzero(np.concatenate([[True], step_sizes > longest_step]))
        ends = np.append(starts[1:], len(places)) - 1
        ranges = list(zip(places[starts].tolist(), (places[ends] + 1).tolist(), strict=True))
        read = self._read(ranges)
        # Where each range begins in the bytes read, minus where it begins in the store.
        lengths = np.array([end - begin for begin, end in ranges])
        shift = np.cumsum(lengths) - lengths - np.array([begin for begin, _ in ranges])
        array: np.ndarray = read[(places + np.repeat(shift, ends - starts + 1))[inverse]].reshape(
            wanted.shape
        )
        return array

    def _read(self, ranges: list[tuple[int, int]]) -> np.ndarray:
        longest = _LONGEST_BYTES // self.dtype.itemsize
        pieces: list[tuple[int, int, int]] = []
        for begin, end in ranges:
            while begin < end:
                file = int(np.searchsorted(self._starts, begin, side="right")) - 1
                stop = min(end, begin + longest, int(self._starts[file + 1]))
                pieces.append(
                    (file, begin - int(self._starts[file]), stop - int(self._starts[file]))
                )
                begin = stop
        is_far = len(pieces) > 1 and is_remote(self._files[0])
        arrays = readers().map(self._read_one, pieces) if is_far else map(self._read_one, pieces)
        return np.concatenate([np.zeros(0, self.dtype), *arrays])

    def _read_one(self, part: tuple[int, int, int]) -> np.ndarray:
        number, begin, end = part
        file, itemsize = self._files[number], self.dtype.itemsize
        if is_remote(file):
            first, last = begin * itemsize, end * itemsize
            blocks = self._blocks
            data = (
                blocks.read_range(file.name, first, last)
                if blocks
                else file.read_range(first, last)
            )
            return np.frombuffer(data, self.dtype)
        return self._mapped(number, file)[begin:end]

    def _mapped(self, number: int, file: Path) -> MappedFile:
        if number not in self._maps:
            size = int(self._starts[number + 1] - self._starts[number]) * self.dtype.itemsize
            self._maps[number] = MappedFile(file, self.dtype, size, self._blocks)
        return self._maps[number]


def _longest_step(steps: np.ndarray, num_wanted: int, itemsize: int) -> int:
    """Returns the longest step between places that one range spans.

    Bytes between ranges are wasted: a few are always allowed, more only up to half of the bytes
    wanted. The documents of rows packed by best fit are far apart, and would otherwise cost a
    request each.
    """
    sizes, counts = np.unique(steps, return_counts=True)
    cheap = sizes[np.cumsum((sizes - 1) * counts) <= num_wanted // 2]
    widest = int(cheap[-1]) if len(cheap) else 0
    return max(_GAP_BYTES // itemsize + 1, min(widest, _WIDEST_GAP_BYTES // itemsize + 1))


@functools.cache
def readers() -> ThreadPoolExecutor:
    """Returns the threads that read ranges of objects; a job on them must not wait for another."""
    return ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="maxbatch-tokens")


class CheckedIds:
    """Token ids that are compared with the vocabulary where they are read.

    Args:
      vocab_size: ids are 0 to vocab_size - 1.
    """

    def __init__(self, tokens: MappedFile | RangedTokens, vocab_size: int, where: AnyPath) -> None:
        self._tokens, self._vocab_size, self._where = tokens, vocab_size, where
        self.dtype = tokens.dtype

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        ids = self._tokens[places]
        least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
        if least < 0 or most >= 1 << 31:
            raise ConfigError(
                f"{self._where}: holds {least if least < 0 else most}, which is not a token id"
            )
        if most >= self._vocab_size:
            rule = f"{self._where} holds the token id {most}, beyond the embedding"
            raise ConfigError(
                f"vocab_size={self._vocab_size}: {rule}; works: vocab_size={most + 1} or more"
            )
        return ids
