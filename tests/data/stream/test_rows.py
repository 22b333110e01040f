from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.data.stream.rows import ConcatenatePlan, DocumentPlan, Extents, WholeLayout, assemble

PAD = 258
PLANS = [ConcatenatePlan, DocumentPlan]


def rows_of(plan_type, lengths: list[int], row_length: int, documents: list[int] | None = None):
    """All rows of a store whose token i is the number i."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chosen = np.arange(len(lengths)) if documents is None else np.array(documents)
    plan = plan_type(partial(WholeLayout, Extents.of(offsets, chosen)), row_length)
    store = np.arange(1000, 1000 + offsets[-1], dtype=np.uint32)
    rows = assemble(store, plan.pieces(np.arange(plan.num_rows)), plan.num_rows, row_length, PAD)
    return plan, rows, [store[offsets[d] : offsets[d + 1]].tolist() for d in chosen]


def test_packed_documents_are_one_sequence_cut_every_row_length() -> None:
    _, rows, _ = rows_of(ConcatenatePlan, [3, 1, 6], 4)
    assert rows["tokens"].tolist() == [
        [1000, 1001, 1002, 1003],
        [1004, 1005, 1006, 1007],
        [1008, 1009, PAD, PAD],
    ]
    assert rows["segments"].tolist() == [[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert rows["weights"].tolist() == [[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]]


def test_unpacked_long_documents_are_split_not_truncated() -> None:
    _, rows, _ = rows_of(DocumentPlan, [3, 1, 6], 4)
    assert rows["tokens"].tolist() == [
        [1000, 1001, 1002, PAD],
        [1003, PAD, PAD, PAD],
        [1004, 1005, 1006, 1007],
        [1008, 1009, PAD, PAD],
    ]
    assert rows["segments"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert rows["weights"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0]]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@pytest.mark.parametrize("plan_type", PLANS)
@given(lengths=LENGTHS, row_length=st.integers(2, 20), data=st.data())
def test_every_token_of_every_document_appears_once_and_in_order(
    plan_type, lengths, row_length, data
) -> None:
    documents = data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1).map(sorted))
    plan, rows, texts = rows_of(plan_type, lengths, row_length, documents)
    filled = rows["segments"] > 0
    assert rows["tokens"][filled].tolist() == [token for text in texts for token in text]
    assert (
        plan.num_tokens == filled.sum()
        and plan.num_rows == len(filled)
        and filled.any(axis=1).all()
    )
    assert (rows["tokens"][~filled] == PAD).all()
    assert (filled == (np.cumsum(~filled, axis=1) == 0)).all(), "padding is at the end"


@pytest.mark.parametrize("plan_type", PLANS)
@given(lengths=LENGTHS, row_length=st.integers(2, 20))
def test_segments_are_documents_and_their_first_tokens_weigh_nothing(
    plan_type, lengths, row_length
) -> None:
    _, rows, texts = rows_of(plan_type, lengths, row_length)
    document_of = {token: number for number, text in enumerate(texts) for token in text}
    for tokens, segments, weights in zip(
        rows["tokens"], rows["segments"], rows["weights"], strict=True
    ):
        previous, segment = None, 0
        for slot, token in enumerate(tokens.tolist()):
            document = document_of.get(token)
            if document is None:
                assert (segments[slot], weights[slot]) == (0, 0)
                continue
            segment += document != previous
            assert segments[slot] == segment
            assert weights[slot] == (document == previous)
            previous = document


def test_packed_rows_are_full_but_the_last() -> None:
    plan, rows, _ = rows_of(ConcatenatePlan, [7, 2, 9, 30, 1], 8)
    assert plan.num_rows == 7
    assert (rows["segments"][:-1] > 0).all()


@pytest.mark.parametrize("plan_type", PLANS)
def test_rows_in_any_order_and_number_are_the_same_rows(plan_type) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    plan, rows, _ = rows_of(plan_type, lengths, 8)
    store = np.arange(1000, 1000 + sum(lengths), dtype=np.uint32)
    order = np.random.default_rng(1).permutation(plan.num_rows)[:20]
    some = assemble(store, plan.pieces(order), len(order), 8, PAD)
    for name, array in some.items():
        assert np.array_equal(array, rows[name][order])


@pytest.mark.parametrize("plan_type", PLANS)
def test_types_are_what_devices_take_also_of_no_rows(plan_type) -> None:
    plan, rows, _ = rows_of(plan_type, [5], 4)
    none = assemble(np.zeros(5, np.uint16), plan.pieces(np.zeros(0, np.int64)), 0, 4, PAD)
    for block in (rows, none):
        assert {name: array.dtype for name, array in block.items()} == {
            "tokens": np.int32,
            "segments": np.int32,
            "weights": np.float32,
        }
    assert none["tokens"].shape == (0, 4)


def test_rows_beyond_32_bits_are_found() -> None:
    offsets = np.array([0, 3 << 32, (3 << 32) + 5], np.int64)
    for plan_type in PLANS:
        plan = plan_type(partial(WholeLayout, Extents.of(offsets, np.arange(2))), 2)
        pieces = plan.pieces(np.array([3 << 31]))
        assert pieces.start_P.tolist() == [3 << 32] and pieces.length_P.tolist() == [2]
