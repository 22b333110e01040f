"""The batches of an audit: random rows, and the same rows permuted, padded or with fewer trained
tokens.

Shapes: B rows, L tokens in a row, U updates. A `RowSpec` names rows, so that equal ones are run
once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from maxbatch.around.auditing.trainer import Batch


class RowSpec(NamedTuple):
    """A description of the rows of every update of a run."""

    num_rows: int
    # full: all tokens trained; uneven: fewer row by row; empty: the last 1 / `parts` untrained
    weights: str = "full"
    parts: int = 1
    order: tuple[int, ...] = ()  # of the rows, some left out or repeated; (): as drawn
    padding: int = 0  # further rows, of zero weight
    trained: str = ""  # further rows or tokens with weight: "padding" rows, or "all" tokens
    other_targets: bool = False  # other tokens after the last trained token of each row
    replaced: int = -1  # the row that another one replaces; -1: none
    updates: int = 0  # of the run; 0: as many as the audit's
    poisoned: bool = False  # a weight of the second update is NaN
    part: tuple[int, int] | None = None  # these rows only
    sequence: tuple[tuple[int, int], ...] = ()  # an update on each of these parts, in turn

    @property
    def rows_given(self) -> int:
        """B: rows of an update."""
        rows = len(self.order) or self.num_rows
        return rows + self.padding if self.part is None else self.part[1] - self.part[0]


class Data(NamedTuple):
    """The parameters of an audit's batches."""

    length: int  # L
    vocab_size: int  # ids 1 to V - 1 occur; 0 may mean padding
    updates: int  # U
    seed: int

    def batches(self, rows: RowSpec) -> list[Batch]:
        """Returns the batch of every update."""
        batches = [self._batch(rows, update) for update in range(rows.updates or self.updates)]
        if rows.part is not None:
            batches = [_cut(batch, *rows.part) for batch in batches]
        if rows.sequence:
            batches = [_cut(batch, *part) for batch in batches for part in rows.sequence]
        return batches

    def _batch(self, rows: RowSpec, update: int) -> Batch:
        drawn = [_drawn(self, update, row) for row in range(rows.num_rows)]
        if rows.replaced >= 0:
            drawn[rows.replaced] = _others(drawn[rows.replaced], self.vocab_size)
        tokens, weights = np.stack(drawn), self._weights(rows)
        if rows.other_targets:
            untrained = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1] == 0
            tokens = np.where(untrained, _others(tokens, self.vocab_size), tokens)
        if rows.order:
            tokens, weights = tokens[list(rows.order)], weights[list(rows.order)]
        if rows.poisoned and update == 1:
            weights[0, 1] = np.nan
        segments = np.ones_like(tokens)
        if rows.padding:
            padding = [_drawn(self, update, rows.num_rows + row) for row in range(rows.padding)]
            tokens = np.concatenate([tokens, padding])
            weights, segments = (
                np.pad(x, ((0, rows.padding), (0, 0))) for x in (weights, segments)
            )
        if rows.trained:
            start = 0 if rows.trained == "all" else -rows.padding
            weights[start:, 1:] = segments[start:] = 1
        return {"tokens": tokens, "weights": weights, "segments": segments}

    def _weights(self, rows: RowSpec) -> np.ndarray:
        weights = np.ones((rows.num_rows, self.length), np.float32)
        weights[:, 0] = 0  # nothing predicts the first token
        if rows.weights == "uneven":
            trained = np.linspace(self.length - 1, 1, rows.num_rows + (rows.num_rows == 1)).astype(
                int
            )
            for row in range(rows.num_rows):
                weights[row, 1 + trained[row - (rows.num_rows == 1)] :] = 0
        elif rows.weights == "empty":
            weights[rows.num_rows - rows.num_rows // rows.parts :] = 0
        return weights


@lru_cache(4096)
def _drawn(data: Data, update: int, row: int) -> np.ndarray:
    """Returns the tokens of a row, [L]."""
    draw = np.random.default_rng([data.seed, update, row])
    return draw.integers(1, data.vocab_size, data.length, dtype=np.int32)


def _others(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the next token of the vocabulary for each token."""
    return (tokens % (vocab_size - 1) + 1).astype(np.int32)


def _cut(batch: Batch, start: int, stop: int) -> Batch:
    return {name: array[start:stop] for name, array in batch.items()}
