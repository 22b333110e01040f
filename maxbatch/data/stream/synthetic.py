"""Rows without a file: text-like, learnable, computed from their index.

A row is words of three letters and a space. The first three words spell the row's number, so every
row is unique and recognisable. The others come from the dataset's lexicon, at one of a few strides
through it: a model learns letters first, then words, then possible successors, and last to infer
the stride. One word in 16 is random, so no model reaches a loss of zero.

Row i depends only on the seed and i, so row 10^9 costs as much as row 0. A row is one document of
exactly L tokens, so `packing`, `add_bos` and `add_eos` have no effect.

Legend: n rows asked for, L row length, K words of a row after its number, W words of the lexicon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.data.stream.rows import RowArrays, RowDocument
from maxbatch.data.stream.trained_tokens import TrainedFigures

_WORDS = 64
_STRIDES = np.array([1, 7, 19, 45], np.uint64)
_NOISE = 16  # One word in this many is random.
_NUMBER_WORDS = 3
_CONSONANTS = np.frombuffer(b"bcdfghjklmnpqrstvwxz", np.uint8).astype(np.int32)
_VOWELS = np.frombuffer(b"aeiouy", np.uint8).astype(np.int32)


class SyntheticRows:
    """The training or the held-out rows of a synthetic dataset."""

    skipped_records = 0
    trained: TrainedFigures | None = None

    def __init__(
        self,
        samples: int,
        row_length: int,
        seed: int,
        token_range: int,
        split: HeldOutFraction,
        held_out: bool,
    ):
        """Describes one split of `samples` rows; tokens are below `token_range`, and ASCII if that
        is at least 128.
        """
        self.row_length = row_length
        self.num_rows = self.num_documents = split.count(samples, held_out)
        self.num_tokens = self.num_rows * row_length
        self._split = split
        self._held_out = held_out
        digest = hashlib.blake2b(f"synthetic {seed}".encode(), digest_size=8).digest()
        self._key = np.frombuffer(digest, np.uint64)
        self._letters, self._space = _alphabet(token_range)
        draw_Wx3 = _mixed(self._key + np.arange(1, 3 * _WORDS + 1, dtype=np.uint64)).reshape(
            _WORDS, 3
        )
        self._lexicon_Wx4 = np.full((_WORDS, 4), self._space, np.int32)
        for place, letters in enumerate(self._letters):
            self._lexicon_Wx4[:, place] = letters[draw_Wx3[:, place] % np.uint64(len(letters))]

    def documents(self, row: int) -> list[RowDocument]:
        return []

    def lengths(self, rows_n: Sequence[int]) -> np.ndarray:
        return np.full(len(rows_n), self.row_length, np.int64)

    def batch(self, rows_n: Sequence[int]) -> RowArrays:
        if self._split.fraction:
            rows_n = [self._split.record(int(row), self._held_out) for row in rows_n]
        number_n = np.asarray(rows_n, np.uint64)
        hash_nx1 = _mixed(self._key ^ _mixed(number_n))[:, None]
        place_1xK = np.arange(max(0, -(-self.row_length // 4) - _NUMBER_WORDS), dtype=np.uint64)[
            None, :
        ]
        stride_nx1 = _STRIDES[hash_nx1 >> np.uint64(8) & np.uint64(len(_STRIDES) - 1)]
        draw_nxK = _mixed(hash_nx1 + place_1xK + np.uint64(1))
        word_nxK = np.where(
            draw_nxK % np.uint64(_NOISE) == 0,
            draw_nxK >> np.uint64(32),
            hash_nx1 + stride_nx1 * place_1xK,
        ) % np.uint64(_WORDS)
        words_nxKx4 = np.concatenate([self._spelled(number_n), self._lexicon_Wx4[word_nxK]], axis=1)
        tokens_nxL = words_nxKx4.reshape(len(number_n), 4 * words_nxKx4.shape[1])[
            :, : self.row_length
        ]
        weights_nxL = np.ones(tokens_nxL.shape, np.float32)
        weights_nxL[:, 0] = 0
        segments_nxL = np.ones(tokens_nxL.shape, np.int32)
        return {
            "tokens": np.ascontiguousarray(tokens_nxL),
            "segments": segments_nxL,
            "weights": weights_nxL,
        }

    def _spelled(self, number_n: np.ndarray) -> np.ndarray:
        """Returns int32[n, 3, 4]: the numbers in letters, lowest digit first; ASCII words reach
        10^10.
        """
        words_nx3x4 = np.full((len(number_n), _NUMBER_WORDS, 4), self._space, np.int32)
        for word in range(_NUMBER_WORDS):
            for place, letters in enumerate(self._letters):
                number_n, digit_n = np.divmod(number_n, np.uint64(len(letters)))
                words_nx3x4[:, word, place] = letters[digit_n]
        return words_nx3x4


def _alphabet(token_range: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    """Returns the letters for a word's three positions, and the space, all below `token_range`."""
    if token_range >= 128:
        return (_CONSONANTS, _VOWELS, _CONSONANTS), ord(" ")
    letters = np.arange(min(1, token_range - 1), token_range, dtype=np.int32)
    return (letters, letters, letters), 0


def _mixed(x: np.ndarray) -> np.ndarray:
    """Returns the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) of a uint64 array."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    array: np.ndarray = x ^ (x >> np.uint64(31))
    return array
