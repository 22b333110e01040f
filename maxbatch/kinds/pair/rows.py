"""The rows of preference pairs: a sample is the prompt with the chosen answer, then with the
rejected one.

A pair is two consecutive documents of the store. Each has its own L slots, so a sample has 2 L: the
chosen answer's tokens are segment 1, the rejected one's segment 2. Pairs are not packed. `overlong`
applies if either document is longer than L.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxbatch.data.store.store import Store
from maxbatch.data.stream.overlong import refuse_overlong
from maxbatch.data.stream.rows import (
    Extents,
    Pieces,
    RowArrays,
    RowDocument,
    assemble,
    documents_of,
)
from maxbatch.data.stream.trained_tokens import TrainedFigures


class PairRows:
    """Pairs of a token store by index.

    Args:
      pairs_S: int64, numbers of the split's pairs.
      length: L.
      overlong: `truncate` (keep the beginning), `drop` or `error`.

    Raises:
      ConfigError: a pair is longer and `overlong` is `error`, or none is left.
    """

    def __init__(
        self, store: Store, pairs_S: np.ndarray, length: int, overlong: str, pad_id: int
    ) -> None:
        self._store, self._length, self._pad_id = store, length, pad_id
        documents_Sx2 = 2 * pairs_S[:, None] + np.arange(2)
        start_Sx2, end_Sx2 = Extents.of(store.offsets, documents_Sx2)
        longest_S = (end_Sx2 - start_Sx2).max(axis=1)
        is_long_S = longest_S > length
        self.num_overlong = int(is_long_S.sum())
        if refuse_overlong("pair", pairs_S, longest_S, length, overlong):
            start_Sx2, end_Sx2 = start_Sx2[~is_long_S], end_Sx2[~is_long_S]
        self._start_Sx2, self._length_Sx2 = start_Sx2, np.minimum(end_Sx2 - start_Sx2, length)
        self.row_length = 2 * length
        self.num_rows = self.num_documents = len(start_Sx2)
        self.num_tokens = int(self._length_Sx2.sum())
        self.skipped_records = int(store.manifest["skipped_records"])
        self.trained: TrainedFigures | None = None

    def documents(self, row: int) -> list[RowDocument]:
        return documents_of(self._store, self._pieces(np.array([row])), documents_per_record=2)

    def _pieces(self, row_n: np.ndarray) -> Pieces:
        return Pieces(
            np.arange(2 * len(row_n)),
            self._start_Sx2[row_n].reshape(-1),
            self._length_Sx2[row_n].reshape(-1),
        )

    def lengths(self, rows_n: Sequence[int]) -> np.ndarray:
        lengths_nx2: np.ndarray = self._length_Sx2[np.asarray(rows_n, np.int64)]
        return lengths_nx2

    def batch(self, rows_n: Sequence[int]) -> RowArrays:
        row_n = np.asarray(rows_n, np.int64)
        count = 2 * len(row_n)
        pieces = self._pieces(row_n)
        halves = assemble(
            self._store.tokens,
            pieces,
            count,
            self._length,
            self._pad_id,
            trained_bit=self._store.trained_bit,
        )
        halves["segments"][1::2] *= 2
        return {name: array.reshape(len(row_n), self.row_length) for name, array in halves.items()}
