"""Records that are equal to earlier ones, found by 128-bit hashes of their tokens.

The hashes are in a file without a name that this process maps, so that memory does not grow with
the records.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from maxbatch.data.store.token_store import TokenStore

# kinds of duplicates, for counts
EQUAL, EQUAL_HELD_OUT = "equal to an earlier record", "equal to a held-out record"

_FIRST_SLOTS = 1 << 12
_MOST_FILLED = 0.7  # share of the slots; more of them would make searches long
_CHUNK_SLOTS = 1 << 16
_DIGEST_BYTES = 16
_HELD_OUT = np.uint64(1 << 63)  # added to the number of a held-out record


class HashTable:
    """Numbers by 128-bit hashes, in a file: slots of two words of the hash (zeros: a free slot) and
    the number.
    """

    def __init__(self, folder: Path, slots: int = _FIRST_SLOTS) -> None:
        self._folder, self._filled = folder, 0
        self._slots = _free_slots(folder, slots)

    def first(self, hashes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Adds the hashes (uint64[n, 2]) that are new, and returns for each the number that came
        first with it.

        Args:
          numbers: uint64[n], those of the hashes.
        """
        hashes = np.ascontiguousarray(hashes)
        hashes[~hashes.any(axis=1)] = 1  # zeros mark a free slot
        _, firsts, places = np.unique(
            hashes.view("V16").ravel(), return_index=True, return_inverse=True
        )
        while self._filled + len(firsts) > _MOST_FILLED * len(self._slots):
            self._double()
        return self._added(hashes[firsts], numbers[firsts])[places]

    def _added(self, hashes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Adds distinct hashes; a slot that is taken sends a hash to the next one."""
        slots, firsts = self._slots, numbers.copy()
        # The slots are a power of two, so `& last` is the remainder.
        pending, last = np.arange(len(hashes)), np.uint64(len(slots) - 1)
        at = hashes[:, 1] & last
        while len(pending):
            wanted = hashes[pending]
            is_free = ~slots[at, :2].any(axis=1)
            # of several hashes for a slot the last gets it
            slots[at[is_free], :2] = wanted[is_free]
            is_there = (slots[at, :2] == wanted).all(axis=1)
            is_new = is_free & is_there
            slots[at[is_new], 2] = numbers[pending[is_new]]
            firsts[pending[is_there]] = slots[at[is_there], 2]
            self._filled += int(is_new.sum())
            # The others go on to the next slot.
            pending, at = pending[~is_there], (at[~is_there] + np.uint64(1)) & last
        return firsts

    def _double(self) -> None:
        old, self._slots, self._filled = (
            self._slots,
            _free_slots(self._folder, 2 * len(self._slots)),
            0,
        )
        for begin in range(0, len(old), _CHUNK_SLOTS):
            chunk = np.array(old[begin : begin + _CHUNK_SLOTS])
            filled = chunk[chunk[:, :2].any(axis=1)]
            self._added(filled[:, :2], filled[:, 2])


def _free_slots(folder: Path, count: int) -> np.ndarray:
    """Returns free slots, uint64[count, 3], in a file; it is written, so that a full disk is an
    error here.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        chunk = bytes(24 * min(count, _CHUNK_SLOTS))
        for _ in range(24 * count // len(chunk)):
            file.write(chunk)
        file.flush()
        return np.memmap(file, np.uint64, mode="r+", shape=(count, 3))


class SeenRecords:
    """The records of a build so far, and the held-out ones, which are left out of it."""

    def __init__(
        self, folder: Path, documents_per_record: int, held_out: TokenStore | None = None
    ) -> None:
        self._table, self._documents, self._count = HashTable(folder), documents_per_record, 0
        if held_out is not None:
            for digests in held_out.digests():
                hashes = record_hashes(digests, documents_per_record)
                self._table.first(hashes, self._numbers(len(hashes)) + _HELD_OUT)

    def _numbers(self, count: int) -> np.ndarray:
        begin, self._count = self._count, self._count + count
        return np.arange(begin, self._count, dtype=np.uint64)

    def duplicates(self, digests: bytes | bytearray) -> tuple[np.ndarray, dict[str, int]]:
        """Returns which of the next documents are duplicates, bool[documents], and the records of
        each kind.

        Args:
          digests: of the documents, one after the other.
        """
        hashes = record_hashes(digests, self._documents)
        numbers = self._numbers(len(hashes))
        first = self._table.first(hashes, numbers)
        is_equal, is_held_out = first != numbers, first >= _HELD_OUT
        kinds = {
            EQUAL: int((is_equal & ~is_held_out).sum()),
            EQUAL_HELD_OUT: int(is_held_out.sum()),
        }
        return np.repeat(is_equal, self._documents), {
            kind: count for kind, count in kinds.items() if count
        }


def record_digest(content: bytes | bytearray) -> bytes:
    """Returns the 128-bit hash by which records are compared."""
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def record_hashes(digests: bytes | bytearray, documents_per_record: int) -> np.ndarray:
    """Returns the hashes of records, uint64[n, 2], from the digests of their documents, one after
    the other.
    """
    if documents_per_record > 1:
        size = documents_per_record * _DIGEST_BYTES
        records = (digests[begin : begin + size] for begin in range(0, len(digests), size))
        digests = b"".join(map(record_digest, records))
    return np.frombuffer(digests, np.uint64).reshape(-1, 2).copy()
