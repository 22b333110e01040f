"""Rows of a store with a document table read by range equal the rows of the same store in
memory.
"""

from __future__ import annotations

import tracemalloc
import zlib
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError
from maxbatch.data.store import document_table
from maxbatch.data.store.document_table import RangedTable, WholeTable
from maxbatch.data.store.heldout import HeldOutFraction, Records
from maxbatch.data.stream.rows import (
    BlockLayout,
    ConcatenatePlan,
    DocumentPlan,
    Extents,
    WholeLayout,
)
from tests.data.store.test_document_table import Saved

# Of up to 25 blocks; a tenth of the documents is long, and many are empty.
LENGTHS = st.builds(
    lambda size, seed: (
        np.random.default_rng(seed).choice([0, 0, 1, 4, 9], size)
        + 200 * (np.arange(size) % 10 == 5)
    ),
    st.integers(6, 200),
    st.integers(0, 1000),
)


def store_of(offsets: np.ndarray, saved: Saved | None) -> Any:
    """A store whose table is in an object store, or (None) on a disk."""
    if saved is None:
        return SimpleNamespace(table=WholeTable(offsets))
    table = RangedTable(saved, len(offsets) - 1, int(offsets[-1]), None, zlib.crc32(saved.content))  # type: ignore[arg-type]
    return SimpleNamespace(table=table)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("plan_type", [ConcatenatePlan, DocumentPlan])
@given(
    lengths=LENGTHS,
    row_length=st.integers(2, 300),
    share=st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(2, 7)]),
    held_out=st.booleans(),
    data=st.data(),
)
def test_rows_by_blocks_are_those_of_the_whole_table(
    plan_type: type,
    is_remote: bool,
    lengths: np.ndarray,
    row_length: int,
    share: Fraction,
    held_out: bool,
    data: st.DataObject,
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = Records(HeldOutFraction(share), len(lengths), held_out and bool(share))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_table, "BLOCK_DOCUMENTS", 8)
        patch.setattr(document_table.LocalTable, "block_documents", 8)
        patch.setattr(document_table, "_RUN_DOCUMENTS", 24)
        lay = partial(
            BlockLayout, store_of(offsets, Saved(offsets) if is_remote else None), documents
        )
        whole = partial(WholeLayout, Extents.of(offsets, documents.between(0, len(lengths))))
        here, there = plan_type(whole, row_length), plan_type(lay, row_length)
        assert (there.num_rows, there.num_tokens) == (here.num_rows, here.num_tokens)
        rows = (
            st.lists(st.integers(0, max(0, here.num_rows - 1)), max_size=5)
            if here.num_rows
            else st.just([])
        )
        for asked in (range(here.num_rows), data.draw(rows)):
            rows_n = np.array(asked, np.int64)
            for found, expected in zip(there.pieces(rows_n), here.pieces(rows_n), strict=True):
                np.testing.assert_array_equal(found, expected)


def test_a_table_that_differs_from_its_checksum_is_one_line() -> None:
    offsets = np.arange(100) * 3
    saved = Saved(offsets)
    store = store_of(offsets, saved)
    changed = offsets.copy()
    changed[50] += 1
    saved.content = Saved(changed).content
    with pytest.raises(ConfigError, match="differs from its checksum"):
        BlockLayout(store, Records(HeldOutFraction(Fraction(0)), 99, False), 8)


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_table_is_not_kept(monkeypatch: pytest.MonkeyPatch, is_remote: bool) -> None:
    monkeypatch.setattr(document_table, "_REQUESTS_OF_A_PASS", 2)
    monkeypatch.setattr(document_table, "_BLOCKS_OF_A_PASS", 1)
    offsets = np.arange(2_000_001) * 7
    store = store_of(offsets, Saved(offsets) if is_remote else None)
    documents = Records(HeldOutFraction(Fraction(1, 10)), 2_000_000, False)
    tracemalloc.start()
    plan = DocumentPlan(partial(BlockLayout, store, documents), 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.num_rows == 2 * len(documents) and peak < offsets.nbytes / (8 if is_remote else 1)
