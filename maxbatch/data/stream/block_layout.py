"""Documents whose table is too large for a host, as slots of a sequence: the number of slots before each block is kept.

One pass over the table counts the slots of the documents that a split has in each block. The documents of a row are
then looked up in its own blocks.

Legend: K blocks of the table, n slots asked for, S documents of some blocks.
"""

from __future__ import annotations

import numpy as np

from maxbatch.data.store import document_table
from maxbatch.data.store.document_table import RangedTable
from maxbatch.data.store.heldout import Records
from maxbatch.data.store.token_store import TokenStore
from maxbatch.data.stream.rows import Extents, Placed


class BlockLayout:
    """A `Layout` of a store whose table is read by range; it keeps eight bytes per block.

    Args:
      store: the store.
      documents: those of the split.
      slot_tokens: tokens that a slot holds; the last slot of a document may hold fewer.

    Raises:
      ConfigError: the table is damaged.
    """

    def __init__(self, store: TokenStore, documents: Records, slot_tokens: int):
        self._store, self._documents, self._slot_tokens = store, documents, slot_tokens
        slots, self.num_tokens = [0], 0
        for number, block in enumerate(self._table.all_blocks(store.manifest["offsets_crc32"])):
            extents = self._extents(number, block)
            slots.append(int(extents.slots(slot_tokens).sum()))
            self.num_tokens += extents.num_tokens
        self._before_K = np.cumsum(slots)
        self.num_slots = int(self._before_K[-1])

    @property
    def _table(self) -> RangedTable:
        table = self._store.table
        assert isinstance(table, RangedTable)
        return table

    def around(self, first_n: np.ndarray, last_n: np.ndarray) -> Placed:
        first_block_n, last_block_n = np.searchsorted(self._before_K, np.stack([first_n, last_n]), side="right") - 1
        ends_of_n = zip(first_block_n.tolist(), last_block_n.tolist(), strict=True)
        numbers = sorted({number for first, last in ends_of_n for number in range(first, last + 1)} or {0})
        blocks = self._table.blocks(numbers)
        extents = [self._extents(number, block) for number, block in zip(numbers, blocks, strict=True)]
        first_S: list[np.ndarray] = []
        for number, one in zip(numbers, extents, strict=True):
            slots_S = one.slots(self._slot_tokens)
            first_S.append(self._before_K[number] + np.cumsum(slots_S) - slots_S)
        first_S.append(self._before_K[[numbers[-1] + 1]])
        start_S, end_S = (np.concatenate(parts) for parts in zip(*extents, strict=True))
        return Placed(np.concatenate(first_S), Extents(start_S, end_S))

    def _extents(self, number: int, block: np.ndarray) -> Extents:
        """Returns where the split's documents of a block lie."""
        first = number * document_table.BLOCK_DOCUMENTS
        return Extents.of(block, self._documents.between(first, first + len(block) - 1) - first)
