"""The passes of an update whose samples share rows, by their lengths alone.

Samples are packed into rows of L slots by best fit over the whole global batch, and rows are taken
M at a time. The packing depends only on the lengths in the order of the stream, so every host finds
the same one.

Legend: S samples of an update, R rows, M rows of a pass, L slots of a row, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxbatch.data.stream.packing import fit
from maxbatch.data.stream.rows import RowArrays


class Passes(NamedTuple):
    """The places of an update's samples in its rows and passes.

    Row r is row r % M of pass r // M. In a row samples follow each other in the order of the
    stream, from its left end on.
    """

    row_S: np.ndarray  # int64; of a sample without tokens 0
    begin_S: np.ndarray  # int64, slot of the sample's first token in its row
    length_S: np.ndarray  # int64, tokens
    num_rows: int  # R
    row_length: int  # L
    rows_per_pass: int  # M

    @classmethod
    def of(cls, length_S: np.ndarray, row_length: int, rows_per_pass: int) -> Passes:
        """Packs samples of 0 to L tokens, in the order of the stream."""
        length_S = np.asarray(length_S, np.int64)
        row_S, begin_S = np.zeros_like(length_S), np.zeros_like(length_S)
        real = np.flatnonzero(length_S)
        row_of_real, num_rows = fit(length_S[real], row_length)
        row_S[real] = row_of_real

        # samples by row, each with the tokens before it in its row
        by_row = real[np.argsort(row_of_real, kind="stable")]
        before = np.cumsum(length_S[by_row]) - length_S[by_row]
        is_first = np.diff(row_S[by_row], prepend=-1) != 0
        begin_S[by_row] = before - np.maximum.accumulate(np.where(is_first, before, 0))
        return cls(row_S, begin_S, length_S, num_rows, row_length, rows_per_pass)

    def of_rows(self, wanted: np.ndarray) -> tuple[np.ndarray, Passes]:
        """Returns the numbers of the samples in some rows, and their places in these rows alone.

        Args:
          wanted: int64, distinct rows in the order in which they are numbered from 0.
        """
        number_R = np.full(max(1, self.num_rows), -1)
        number_R[wanted] = np.arange(len(wanted))
        here = np.flatnonzero((number_R[self.row_S] >= 0) & (self.length_S > 0))
        places = number_R[self.row_S[here]], self.begin_S[here], self.length_S[here]
        return here, Passes(*places, len(wanted), self.row_length, self.rows_per_pass)

    @property
    def num_passes(self) -> int:
        return -(-self.num_rows // self.rows_per_pass)

    @property
    def num_tokens(self) -> int:
        return int(self.length_S.sum())

    @property
    def row_share(self) -> float | None:
        """Tokens as a share of the slots of the rows that hold any; None without tokens."""
        return self._share_of(self.num_rows)

    @property
    def slot_share(self) -> float | None:
        """Tokens as a share of the slots of all passes; None without tokens."""
        return self._share_of(self.num_passes * self.rows_per_pass)

    def _share_of(self, rows: int) -> float | None:
        return self.num_tokens / (rows * self.row_length) if rows else None


def token_counts(segments_SxL: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of samples that are filled from the left: int64[S]."""
    counts: np.ndarray = np.count_nonzero(segments_SxL, axis=1)
    return counts


def packed(rows: RowArrays, passes: Passes) -> RowArrays:
    """Moves samples, a row each, into the rows of an update.

    Args:
      rows: `tokens`, `segments` and `weights` of the samples, [S, L], filled from the left.

    Returns:
      These arrays, [R, L], with zeros behind the last sample of a row. The segments of a row are
      numbered through, so that documents stay apart. `begins` int32[R, L] is 1 + the token that
      pads a sample's own row at the sample's first token, else 0.
    """
    row_S, begin_S, length_S, num_rows, length, _ = passes
    is_token_SxL = np.arange(length) < length_S[:, None]
    first_S = row_S * length + begin_S  # slot of each sample in all rows
    slot_T = np.repeat(first_S - np.cumsum(length_S) + length_S, length_S)
    slot_T += np.arange(len(slot_T))

    real = np.flatnonzero(length_S)
    by_slot = real[np.argsort(first_S[real])]
    count = rows["segments"][by_slot].max(axis=1, initial=0).astype(np.int64)
    before = np.cumsum(count) - count
    is_first = begin_S[by_slot] == 0
    shift_S = np.zeros(len(row_S), np.int32)
    shift_S[by_slot] = before - np.maximum.accumulate(np.where(is_first, before, 0))

    filled = {name: array[is_token_SxL] for name, array in rows.items()}
    filled["segments"] += np.repeat(shift_S, length_S)
    arrays = {
        name: np.zeros((num_rows, length), array.dtype)
        for name, array in [*filled.items(), ("begins", shift_S)]
    }
    for name, values_T in filled.items():
        arrays[name].reshape(-1)[slot_T] = values_T
    # the token behind a sample in its own row; a sample that fills its row is padded by none
    padding_S = rows["tokens"][np.arange(len(row_S)), np.minimum(length_S, length - 1)]
    arrays["begins"].reshape(-1)[first_S[real]] = (
        1 + np.where(length_S < length, padding_S, 0)[real]
    )
    return arrays
