"""The passes of an update whose samples share rows, by their lengths alone.

Samples are packed into rows of L slots by best fit over the whole global batch, and rows are taken
M at a time. The packing depends only on the lengths in the order of the stream, so every host finds
the same one.

Legend: S samples of an update, K rows that a sample has on its own (2 of a pair), P pieces (S K),
R rows, M rows of a pass, L slots of a row, W slots of a sample (K L), Q passes, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxbatch.data.stream.packing import fit
from maxbatch.data.stream.rows import RowArrays


class Passes(NamedTuple):
    """The places of an update's samples in its rows and passes.

    A sample is K pieces, one for each of its own rows; piece k of sample s is piece s K + k. Row r
    is row r % M of pass r // M. In a row pieces follow each other in the order of the stream, from
    its left end on. All pieces of a sample are in one pass.
    """

    row_P: np.ndarray  # int64; of a piece without tokens 0
    begin_P: np.ndarray  # int64, slot of the piece's first token in its row
    length_P: np.ndarray  # int64, tokens
    # int64, 1 + k + K x the sample's number in its pass, or in its rows together
    number_P: np.ndarray
    num_rows: int  # R
    row_length: int  # L
    rows_per_pass: int  # M
    rows_per_sample: int = 1  # K

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        row_length: int,
        rows_per_pass: int,
        rows_together: int | None = None,
    ) -> Passes:
        """Packs samples in the order of the stream.

        Args:
          lengths: tokens of each sample, [S], or of each of its own rows, [S, K]; 0 to L each. A
            pass must hold K rows.
          rows_together: rows among which all pieces of a sample are, at least K, and a divisor of
            M: the rows then do not depend on M; None: those of a pass. `number_P` counts the
            samples in them.
        """
        rows_together = rows_together or rows_per_pass
        lengths = np.asarray(lengths, np.int64)
        length_SxK = lengths[:, None] if lengths.ndim == 1 else lengths
        num_samples, pieces = length_SxK.shape
        length_P = length_SxK.reshape(-1)
        row_P, begin_P = np.zeros_like(length_P), np.zeros_like(length_P)
        real = np.flatnonzero(length_P)
        if pieces == 1:
            row_of_real, num_rows = fit(length_P[real], row_length)
            row_P[real] = row_of_real
        else:
            row_P = _fit_together(length_SxK, row_length, rows_together).reshape(-1)
            num_rows = int(row_P[real].max(initial=-1)) + 1

        # pieces by row, each with the tokens before it in its row
        by_row = real[np.argsort(row_P[real], kind="stable")]
        before = np.cumsum(length_P[by_row]) - length_P[by_row]
        is_first = np.diff(row_P[by_row], prepend=-1) != 0
        begin_P[by_row] = before - np.maximum.accumulate(np.where(is_first, before, 0))

        pass_S = row_P.reshape(num_samples, pieces).max(axis=1) // rows_together
        by_pass = np.argsort(pass_S, kind="stable")
        place_S = np.arange(num_samples)
        is_first = np.diff(pass_S[by_pass], prepend=-1) != 0
        number_S = np.empty_like(place_S)
        number_S[by_pass] = place_S - np.maximum.accumulate(np.where(is_first, place_S, 0))
        number_P = (1 + pieces * number_S[:, None] + np.arange(pieces)).reshape(-1)
        sizes = num_rows, row_length, rows_per_pass, pieces
        return cls(row_P, begin_P, length_P, number_P, *sizes)

    def of_rows(self, wanted: np.ndarray) -> tuple[np.ndarray, Passes]:
        """Returns the numbers of the samples with tokens in some rows, and the places of these
        samples in these rows alone; pieces elsewhere have no tokens.

        Args:
          wanted: int64, distinct rows in the order in which they are numbered from 0.
        """
        number_R = np.full(max(1, self.num_rows), -1)
        number_R[wanted] = np.arange(len(wanted))
        is_here_P = (number_R[self.row_P] >= 0) & (self.length_P > 0)
        here = np.unique(np.flatnonzero(is_here_P) // self.rows_per_sample)
        pieces = here[:, None] * self.rows_per_sample + np.arange(self.rows_per_sample)
        pieces = pieces.reshape(-1)
        is_here = is_here_P[pieces]
        own = self._replace(
            row_P=np.where(is_here, number_R[self.row_P[pieces]], 0),
            begin_P=self.begin_P[pieces],
            length_P=np.where(is_here, self.length_P[pieces], 0),
            number_P=self.number_P[pieces],
            num_rows=len(wanted),
        )
        return here, own

    @property
    def num_passes(self) -> int:
        return -(-self.num_rows // self.rows_per_pass)

    @property
    def num_tokens(self) -> int:
        return int(self.length_P.sum())

    @property
    def row_share(self) -> float | None:
        """Tokens as a share of the slots of the rows that hold any; None without tokens."""
        return self._share_of(len(np.unique(self.row_P[self.length_P > 0])))

    @property
    def slot_share(self) -> float | None:
        """Tokens as a share of the slots of all passes; None without tokens."""
        return self._share_of(self.num_passes * self.rows_per_pass)

    def _share_of(self, rows: int) -> float | None:
        return self.num_tokens / (rows * self.row_length) if rows else None


def _fit_together(length_SxK: np.ndarray, row_length: int, rows_per_pass: int) -> np.ndarray:
    """Returns the rows of samples whose pieces are in one pass: int64[S, K].

    Samples, those of the longest pieces first, go into the pass with the least free space that
    holds them, and there each piece into the row with the least free space that holds it. A pass
    that holds fewer than M // K samples has K empty rows, so there are at most S / (M // K) passes.
    """
    num_samples = len(length_SxK)
    row_SxK = np.zeros(length_SxK.shape, np.int64)
    most_passes = -(-num_samples // max(1, rows_per_pass // length_SxK.shape[1]))
    free_QxM = np.full((most_passes, rows_per_pass), row_length, np.int64)
    total_Q, largest_Q = free_QxM.sum(axis=1), free_QxM.max(axis=1)
    num_passes = 0
    for sample in np.lexsort((np.arange(num_samples), -length_SxK.max(axis=1))).tolist():
        lengths = length_SxK[sample]
        opened = slice(num_passes)
        holds = (largest_Q[opened] >= lengths.max()) & (total_Q[opened] >= lengths.sum())
        candidates = np.flatnonzero(holds)
        tried = candidates[np.argsort(total_Q[candidates], kind="stable")].tolist()
        for number in [*tried, num_passes]:
            rows = _best_rows(free_QxM[number], lengths)
            if rows is not None:
                break
        assert rows is not None, "an empty pass holds a sample"
        num_passes = max(num_passes, number + 1)
        np.subtract.at(free_QxM[number], rows, lengths)
        total_Q[number], largest_Q[number] = free_QxM[number].sum(), free_QxM[number].max()
        row_SxK[sample] = number * rows_per_pass + rows

    # passes in the order of their first samples
    _, first, pass_S = np.unique(
        row_SxK[:, 0] // rows_per_pass, return_index=True, return_inverse=True
    )
    rank = np.argsort(np.argsort(first))
    ranked: np.ndarray = rank[pass_S][:, None] * rows_per_pass + row_SxK % rows_per_pass
    return ranked


def _best_rows(free_M: np.ndarray, lengths_K: np.ndarray) -> np.ndarray | None:
    """Returns a row for each piece of a sample, the longest first; None if they do not fit."""
    free_M, rows_K = free_M.copy(), np.zeros(len(lengths_K), np.int64)
    for piece in np.argsort(-lengths_K, kind="stable").tolist():
        left_M = free_M - lengths_K[piece]
        left_M[left_M < 0] = np.iinfo(np.int64).max
        rows_K[piece] = row = int(left_M.argmin())
        if free_M[row] < lengths_K[piece]:
            return None
        free_M[row] -= lengths_K[piece]
    return rows_K


def token_counts(segments_SxW: np.ndarray, rows_per_sample: int = 1) -> np.ndarray:
    """Returns the tokens of each own row of samples, K rows of L = W / K slots filled from the left:
    int64[S, K].
    """
    segments_SxKxL = segments_SxW.reshape(len(segments_SxW), rows_per_sample, -1)
    counts: np.ndarray = np.count_nonzero(segments_SxKxL, axis=2)
    return counts


def packed(rows: RowArrays, passes: Passes) -> RowArrays:
    """Moves samples, each in rows of its own, into the rows of an update.

    Args:
      rows: `tokens`, `segments` and others of the samples, [S, K L], rows filled from the left.

    Returns:
      These arrays, [R, L], with zeros behind the last piece of a row. The segments of a row are
      numbered on, so that documents stay apart. `begins` int32[R, L] is 1 + the token that pads a
      piece's own row at the piece's first token, else 0. Of samples of several rows `numbers`
      int32[R, L] is `Passes.number_P` at each token, else 0.
    """
    length, num_rows = passes.row_length, passes.num_rows
    row_P, begin_P, length_P = passes.row_P, passes.begin_P, passes.length_P
    rows = {name: array.reshape(len(row_P), length) for name, array in rows.items()}
    is_token_PxL = np.arange(length) < length_P[:, None]
    first_P = row_P * length + begin_P  # slot of each piece in all rows
    slot_T = np.repeat(first_P - np.cumsum(length_P) + length_P, length_P)
    slot_T += np.arange(len(slot_T))

    real = np.flatnonzero(length_P)
    by_slot = real[np.argsort(first_P[real])]
    count = rows["segments"][by_slot].max(axis=1, initial=0).astype(np.int64)
    before = np.cumsum(count) - count
    is_first = begin_P[by_slot] == 0
    shift_P = np.zeros(len(row_P), np.int32)
    shift_P[by_slot] = before - np.maximum.accumulate(np.where(is_first, before, 0))

    filled = {name: array[is_token_PxL] for name, array in rows.items()}
    filled["segments"] += np.repeat(shift_P, length_P)
    if passes.rows_per_sample > 1:
        filled["numbers"] = np.repeat(passes.number_P.astype(np.int32), length_P)
    # the token behind a piece in its own row; a piece that fills its row is padded by none
    padding_P = rows["tokens"][np.arange(len(row_P)), np.minimum(length_P, length - 1)]
    filled["begins"] = np.zeros(len(slot_T), np.int32)
    begins_P = 1 + np.where(length_P < length, padding_P, 0)
    filled["begins"][(np.cumsum(length_P) - length_P)[real]] = begins_P[real]

    arrays = {name: np.zeros((num_rows, length), values.dtype) for name, values in filled.items()}
    for name, values_T in filled.items():
        arrays[name].reshape(-1)[slot_T] = values_T
    return arrays
