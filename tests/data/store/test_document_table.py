"""The table of documents of a store: the same answers whole and by range, in little memory and few
requests.
"""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError
from maxbatch.data.store import document_table
from maxbatch.data.store.document_table import RangedTable, WholeTable


class Opened:
    """A local file with reads by range."""

    def __init__(self, read_range: Callable[[int, int], bytes]) -> None:
        self._read_range, self._place = read_range, 0

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, size: int) -> bytes:
        return self._read_range(self._place, self._place + size)


class Saved:
    """A table as an object of a store, whose reads are counted."""

    def __init__(self, offsets: np.ndarray) -> None:
        file = io.BytesIO()
        np.save(file, offsets)
        self.content, self.reads = file.getvalue(), 0

    def open(self, mode: str) -> Opened:
        return Opened(self.read_range)

    def read_range(self, begin: int, end: int) -> bytes:
        self.reads += 1
        return self.content[begin:end]


class Computed:
    """A table that nobody could keep: the first half of the documents is short, the other long."""

    def __init__(self, num_documents: int) -> None:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": (num_documents + 1,)}
        )
        self.header, self.half, self.reads = file.getvalue(), num_documents // 2, 0
        self.num_tokens = int(self.starts(np.array([num_documents]))[0])

    def starts(self, documents: np.ndarray) -> np.ndarray:
        return documents * 10 + np.maximum(0, documents - self.half) * 5000

    def open(self, mode: str) -> Opened:
        return Opened(self.read_range)

    def read_range(self, begin: int, end: int) -> bytes:
        self.reads += 1
        if begin == 0:
            return self.header[:end]
        first, last = (begin - len(self.header)) // 8, (end - len(self.header)) // 8
        return self.starts(np.arange(first, last)).tobytes()


def ranged(
    saved: Saved | Computed, num_documents: int, num_tokens: int, checksum: int = 0
) -> RangedTable:
    return RangedTable(saved, num_documents, num_tokens, None, checksum)  # type: ignore[arg-type]


@given(lengths=st.lists(st.integers(0, 9) | st.just(5000), min_size=1, max_size=300).filter(any))
def test_a_table_that_is_read_by_range_answers_as_the_whole_one(lengths: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_table, "BLOCK_DOCUMENTS", 8)
        patch.setattr(document_table, "KEPT_BYTES", 3 * 64)
        table, whole = ranged(Saved(offsets), len(lengths), int(offsets[-1])), WholeTable(offsets)
        tokens = np.unique(np.concatenate([offsets[:-1], offsets[1:] - 1]).clip(0, offsets[-1] - 1))
        tokens = np.stack([tokens[::-1], tokens])
        for asked in (table, pickle.loads(pickle.dumps(table))):
            np.testing.assert_array_equal(asked.containing(tokens), whole.containing(tokens))
            documents = np.arange(len(offsets))
            np.testing.assert_array_equal(asked.starts(documents), whole.starts(documents))


@pytest.mark.parametrize("num_documents", [1, 7, 8, 9, 24, 25, 300])
def test_a_pass_over_a_table_reads_it_once_and_compares_its_checksum(num_documents: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, num_documents)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_table, "BLOCK_DOCUMENTS", 8)
        patch.setattr(document_table, "_BLOCKS_OF_A_PASS", 3)
        saved = Saved(offsets)
        table = ranged(saved, num_documents, int(offsets[-1]), zlib.crc32(saved.content))
        saved.reads = 0
        blocks = list(table.runs())
        assert saved.reads == -(-num_documents // 24)
        assert [block.tolist() for block in blocks] == [
            offsets[first : first + 9].tolist() for first in range(0, num_documents, 8)
        ]
        for changed in {5, len(saved.content) - 1}:  # of the header, and of the last start
            damaged = bytearray(saved.content)
            damaged[changed] ^= 1
            with pytest.raises(
                ConfigError, match="it differs from its checksum; prepare the store again"
            ):
                list(ranged(saved, num_documents, int(offsets[-1]), zlib.crc32(damaged)).runs())


def test_memory_and_requests_do_not_grow_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 16
    monkeypatch.setattr(document_table, "KEPT_BYTES", blocks * 8 * document_table.BLOCK_DOCUMENTS)
    random = np.random.default_rng(0)
    reads = {}
    tracemalloc.start()
    for num_documents in (5_000_000, 50_000_000):
        saved = Computed(num_documents)
        table = ranged(saved, num_documents, saved.num_tokens)
        assert saved.reads <= 2, "its header and its end"
        rows = random.integers(0, saved.num_tokens, 300)
        for row in rows[:100]:
            table.containing(np.array([row]))
        saved.reads = 0
        for row in rows[100:]:
            document = table.containing(np.array([row]))
            start, end = table.starts(np.concatenate([document, document + 1]))
            assert start <= row < end
        reads[num_documents] = saved.reads / 200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * blocks * 8 * document_table.BLOCK_DOCUMENTS, "the larger table takes 400 MB"
    assert max(reads.values()) < 2, reads


def test_a_table_that_is_damaged_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_table, "BLOCK_DOCUMENTS", 8)
    offsets = np.arange(100)
    with pytest.raises(
        ConfigError, match="ends at token 99, and the store has 98; prepare the store again"
    ):
        ranged(Saved(offsets), 99, 98)
    with pytest.raises(ConfigError, match="it has 100 numbers of int64"):
        ranged(Saved(offsets), 98, 98)
    other = Saved(offsets)
    other.content = b"x" * len(other.content)
    with pytest.raises(ConfigError, match="its header: is not a NumPy array"):
        ranged(other, 99, 99)
    offsets[5] = 90
    table = ranged(Saved(offsets), 99, 99)
    with pytest.raises(ConfigError, match="documents 0 to 8 are not in order"):
        table.containing(np.array([3]))
