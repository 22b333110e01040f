"""Documents cut into rows, as an index: the pieces of documents that make row r.

A piece is a run of consecutive tokens of one document; a row is pieces from its left end, then
padding. A plan is computed once from document lengths, is the same for all epochs, and finds a
row's pieces by binary search.

Legend: n rows asked for, L row length, P pieces of these rows, S documents of the split, K blocks
of a table read by range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from maxbatch.data.store.blocks import MappedFile
from maxbatch.data.store.document_table import BlockTable, WholeTable
from maxbatch.data.store.heldout import Records
from maxbatch.data.store.ranged_tokens import CheckedIds, RangedTokens
from maxbatch.data.store.store import Store
from maxbatch.data.stream.trained_tokens import TrainedFigures
from maxbatch.system.storage.storage import AnyPath

# `tokens` int32, `segments` int32, `weights` float32; each [n, L], or [L] for one row.
RowArrays = dict[str, np.ndarray]


class Pieces(NamedTuple):
    """Pieces of some rows, in order of row and position."""

    row_P: np.ndarray  # int64, index of the piece's row among the requested rows
    start_P: np.ndarray  # int64, index of its first token in the store
    length_P: np.ndarray  # int64, tokens, at least 1; the pieces of a row add up to at most L


def tokens_of(pieces: Pieces, num_rows: int) -> np.ndarray:
    """Returns the tokens of each of some rows, by their pieces: int64[n]."""
    lengths_n = np.bincount(pieces.row_P, weights=pieces.length_P, minlength=num_rows)
    return lengths_n.astype(np.int64)


class Extents(NamedTuple):
    """The places of documents in the store."""

    start_S: np.ndarray  # int64, index of the document's first token
    end_S: np.ndarray  # int64, index after its last token

    @classmethod
    def of(cls, offsets: np.ndarray, documents_S: np.ndarray) -> Extents:
        """Returns the extents of documents `documents_S` in a store with `offsets` (int64[documents
        + 1]).
        """
        return cls(offsets[documents_S], offsets[documents_S + 1])

    @property
    def num_tokens(self) -> int:
        return int((self.end_S - self.start_S).sum())

    def slots(self, slot_tokens: int) -> np.ndarray:
        """Returns each document's number of slots of `slot_tokens` tokens, the last one possibly in
        part.
        """
        array: np.ndarray = -(-(self.end_S - self.start_S) // slot_tokens)
        return array


class RowDocument(NamedTuple):
    """A part of a document in a row."""

    store: AnyPath  # the folder of its store
    document: int  # its number in the store, from 0
    record: int  # the number of its record among those of the store, from 0
    offset: int  # the part's first token in the document, from 0
    tokens: int  # of the part


def documents_of(store: Store, pieces: Pieces, documents_per_record: int = 1) -> list[RowDocument]:
    """Returns the documents of the pieces of one row, in order."""
    document_P = store.table.containing(pieces.start_P)
    offset_P = pieces.start_P - store.table.starts(document_P)
    parts = zip(document_P.tolist(), offset_P.tolist(), pieces.length_P.tolist(), strict=True)
    return [
        RowDocument(store.folder, document, document // documents_per_record, offset, tokens)
        for document, offset, tokens in parts
    ]


class RowPlan(Protocol):
    """A cut of documents into `num_rows` rows of `row_length` slots, with `num_tokens` tokens."""

    row_length: int
    num_rows: int
    num_tokens: int

    def pieces(self, rows_n: np.ndarray) -> Pieces: ...


class Placed(NamedTuple):
    """Documents in order, and their places in a sequence of slots."""

    first_S: np.ndarray  # int64[S + 1], the first slot of each document, then the slot after all
    extents: Extents


class SlotLayout(Protocol):
    """Documents laid out in `num_slots` slots; a slot has tokens of one document."""

    num_slots: int
    num_tokens: int

    def around(self, first_n: np.ndarray, last_n: np.ndarray) -> Placed:
        """Returns the documents in slots first_n[i] to last_n[i], for every i, and possibly
        others.
        """


class WholeLayout:
    """A layout in memory.

    Args:
      slot_tokens: tokens that a slot holds; the last slot of a document may hold fewer.
    """

    def __init__(self, extents: Extents, slot_tokens: int):
        self._placed = Placed(np.concatenate([[0], np.cumsum(extents.slots(slot_tokens))]), extents)
        self.num_slots = int(self._placed.first_S[-1])
        self.num_tokens = extents.num_tokens

    def around(self, first_n: np.ndarray, last_n: np.ndarray) -> Placed:
        return self._placed


class BlockLayout:
    """A layout of documents that are too many for a host's memory; it keeps eight bytes per block
    of their table.

    One pass over the table counts the slots of the split's documents in each block. The documents
    of a row are then looked up in its own blocks.

    Args:
      slot_tokens: tokens that a slot holds; the last slot of a document may hold fewer.

    Raises:
      ConfigError: the table is damaged.
    """

    def __init__(self, store: Store, documents: Records, slot_tokens: int):
        self._store, self._documents, self._slot_tokens = store, documents, slot_tokens
        table = store.table
        counts_K, self.num_tokens, first = [np.zeros(1, np.int64)], 0, 0
        for starts in table.runs():
            count = len(starts) - 1
            numbers_S = documents.between(first, first + count) - first
            extents = Extents.of(starts, numbers_S)
            # Slots per block: the split's documents up to each block's end, then the slots of them.
            ends_K = np.searchsorted(
                numbers_S, np.arange(0, count, table.block_documents) + table.block_documents
            )
            before_S = np.concatenate([[0], np.cumsum(extents.slots(slot_tokens))])
            counts_K.append(np.diff(before_S[ends_K], prepend=0))
            self.num_tokens += extents.num_tokens
            first += count
        self._before_K = np.cumsum(np.concatenate(counts_K))
        self.num_slots = int(self._before_K[-1])

    def around(self, first_n: np.ndarray, last_n: np.ndarray) -> Placed:
        first_block_n, last_block_n = (
            np.searchsorted(self._before_K, np.stack([first_n, last_n]), side="right") - 1
        )
        # All blocks from the first to the last slot of each row; block 0 if there are no rows.
        ends_of_n = zip(first_block_n.tolist(), last_block_n.tolist(), strict=True)
        numbers = sorted(
            {number for first, last in ends_of_n for number in range(first, last + 1)} or {0}
        )
        blocks = self._store.table.blocks(numbers)
        extents = [
            self._extents(number, block) for number, block in zip(numbers, blocks, strict=True)
        ]

        first_S: list[np.ndarray] = []
        for number, extent in zip(numbers, extents, strict=True):
            slots_S = extent.slots(self._slot_tokens)
            first_S.append(self._before_K[number] + np.cumsum(slots_S) - slots_S)
        first_S.append(self._before_K[[numbers[-1] + 1]])
        start_S, end_S = (np.concatenate(arrays) for arrays in zip(*extents, strict=True))
        return Placed(np.concatenate(first_S), Extents(start_S, end_S))

    def _extents(self, number: int, block: np.ndarray) -> Extents:
        """Returns the extents of the split's documents in a block."""
        first = number * self._store.table.block_documents
        return Extents.of(block, self._documents.between(first, first + len(block) - 1) - first)


Lay = Callable[[int], SlotLayout]  # (tokens per slot) -> layout of documents


class ConcatenatePlan:
    """A plan of documents joined into one sequence and cut every L tokens; pads the last row, drops
    nothing.
    """

    def __init__(self, lay: Lay, row_length: int):
        self._layout = lay(1)
        self._set(row_length, self._layout.num_tokens)

    @classmethod
    def of_store(cls, store: Store, row_length: int) -> ConcatenatePlan:
        """Returns the plan of all documents of a store, joined in order, without any array."""
        plan = cls.__new__(cls)
        plan._set(row_length, int(store.manifest["tokens"]))
        plan._store = store
        return plan

    def _set(self, row_length: int, num_tokens: int) -> None:
        self.row_length = row_length
        self.num_tokens = num_tokens
        self.num_rows = -(-num_tokens // row_length)
        self._store: Store | None = None  # a store included whole, in order

    def pieces(self, rows_n: np.ndarray) -> Pieces:
        begin_n = rows_n * self.row_length
        end_n = np.minimum(begin_n + self.row_length, self.num_tokens)
        joined, store_start_S = self._joined(begin_n, end_n - 1)

        # The documents of each row, numbered as in `joined`: one piece for each.
        first_n, last_n = joined.containing(np.stack([begin_n, end_n - 1]))
        count_n = last_n - first_n + 1
        row_P = np.repeat(np.arange(len(rows_n)), count_n)
        place_P = np.arange(len(row_P)) - np.repeat(np.cumsum(count_n) - count_n, count_n)
        document_P = first_n[row_P] + place_P

        # A piece is the part of its document within its row, at its place in the store.
        start_P, next_start_P = joined.starts(np.stack([document_P, document_P + 1]))
        low_P = np.maximum(start_P, begin_n[row_P])
        high_P = np.minimum(next_start_P, end_n[row_P])
        shift_P = 0 if store_start_S is None else store_start_S[document_P] - start_P
        return Pieces(row_P, low_P + shift_P, high_P - low_P)

    def _joined(
        self, first_n: np.ndarray, last_n: np.ndarray
    ) -> tuple[BlockTable, np.ndarray | None]:
        """Returns the starts of documents in the joined sequence, and in the store (None if
        equal).
        """
        if self._store:
            return self._store.table, None
        placed = self._layout.around(first_n, last_n)
        return WholeTable(placed.first_S), placed.extents.start_S


class DocumentPlan:
    """A plan with one document per row; a document of n tokens fills ceil(n / L) rows, the last one
    padded.
    """

    def __init__(self, lay: Lay, row_length: int):
        self.row_length = row_length
        self._layout = lay(row_length)
        self.num_tokens = self._layout.num_tokens
        self.num_rows = self._layout.num_slots

    def pieces(self, rows_n: np.ndarray) -> Pieces:
        first_row_S, (store_start_S, store_end_S) = self._layout.around(rows_n, rows_n)
        document_n = np.searchsorted(first_row_S, rows_n, side="right") - 1
        start_n = store_start_S[document_n] + (rows_n - first_row_S[document_n]) * self.row_length
        end_n = np.minimum(start_n + self.row_length, store_end_S[document_n])
        return Pieces(np.arange(len(rows_n)), start_n, end_n - start_n)


def assemble(
    tokens: np.ndarray | MappedFile | RangedTokens | CheckedIds,
    pieces: Pieces,
    num_rows: int,
    row_length: int,
    pad_id: int,
    trained_bit: int | None = None,
) -> RowArrays:
    """Copies pieces of the store's tokens into n = `num_rows` rows of L = `row_length` slots.

    Returns:
      `tokens` int32[n, L], `pad_id` in empty slots; `segments` int32[n, L], the piece's number in
      its row from 1, 0 at padding; `weights` float32[n, L], 1 where a token follows another of its
      segment and, if the store has a `trained_bit`, has it set; else 0.
    """
    row_P, start_P, length_P = pieces
    end_P = np.cumsum(length_P)
    begin_P = end_P - length_P
    total = int(end_P[-1]) if len(end_P) else 0

    # Pieces are numbered from 1 in each row.
    new_row_P = np.diff(row_P, prepend=-1) != 0
    first_piece_P = np.maximum.accumulate(np.where(new_row_P, np.arange(len(row_P)), 0))
    segment_P = (np.arange(len(row_P)) - first_piece_P + 1).astype(np.int32)

    # All tokens by one indexing: begin_P is a piece's place in the result, start_P in the store.
    stored = tokens[np.repeat(start_P - begin_P, length_P) + np.arange(total)]
    weights = np.ones(total, np.float32)
    if trained_bit is not None:
        bit = stored.dtype.type(trained_bit)
        weights = (stored >> bit).astype(np.float32)
        stored = stored & stored.dtype.type((1 << trained_bit) - 1)
    filled = {
        "tokens": stored.astype(np.int32),
        "segments": np.repeat(segment_P, length_P),
        "weights": weights,
    }
    filled["weights"][begin_P] = 0  # nothing before a segment's first token predicts it

    shape = (num_rows, row_length)
    if total == num_rows * row_length:
        return {name: slots.reshape(shape) for name, slots in filled.items()}
    # A row's pieces fill it from the left; the rest is padding.
    length_n = tokens_of(pieces, num_rows)
    is_filled_nxL = np.arange(row_length) < length_n[:, None]
    rows = {name: np.zeros(shape, slots.dtype) for name, slots in filled.items()}
    rows["tokens"].fill(pad_id)
    for name, slots in filled.items():
        rows[name][is_filled_nxL] = slots
    return rows


class RowSource(Protocol):
    """The rows of one split of a dataset. `num_documents` and `num_tokens` count the whole
    split.
    """

    row_length: int
    num_rows: int
    num_tokens: int
    num_documents: int
    skipped_records: int
    trained: TrainedFigures | None  # if records say which tokens are trained on

    def batch(self, rows_n: Sequence[int]) -> RowArrays: ...

    # int64: tokens of each row, [n], or of each of its K parts, [n, K]
    def lengths(self, rows_n: Sequence[int]) -> np.ndarray: ...

    # the documents of a row, one for each of its segments; none if rows are computed
    def documents(self, row: int) -> list[RowDocument]: ...


class StoredRows:
    """Rows of a token store by index, as slices of a memory map, so that opening reads nothing."""

    trained: TrainedFigures | None = None

    def __init__(self, store: Store, plan: RowPlan, num_documents: int, pad_id: int):
        self.row_length = plan.row_length
        self.num_rows = plan.num_rows
        self.num_tokens = plan.num_tokens
        self.num_documents = num_documents
        self.skipped_records = int(store.manifest["skipped_records"])
        self._store = store
        self._plan = plan
        self._pad_id = pad_id

    def documents(self, row: int) -> list[RowDocument]:
        return documents_of(self._store, self._plan.pieces(np.array([row], np.int64)))

    def lengths(self, rows_n: Sequence[int]) -> np.ndarray:
        pieces = self._plan.pieces(np.asarray(rows_n, np.int64))
        return tokens_of(pieces, len(rows_n))

    def batch(self, rows_n: Sequence[int]) -> RowArrays:
        pieces = self._plan.pieces(np.asarray(rows_n, np.int64))
        trained_bit = self._store.trained_bit
        return assemble(
            self._store.tokens, pieces, len(rows_n), self.row_length, self._pad_id, trained_bit
        )
