"""Log-probabilities of given tokens, batched, on any mesh.

Rows of similar length share a program: the number of tokens before the last is rounded up to a
power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import DecoderConfig
from maxbatch.config.sections import MeshConfig
from maxbatch.model.loss import target_scores
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES, pipeline_microbatches
from maxbatch.update.model_on_mesh import ModelOnMesh

_SHORTEST_ROW = 16
_TOKENS_AT_ONCE = 4096  # tokens per batch shard


class RowScores(NamedTuple):
    """The scores of a row's n tokens, except the first, given the previous ones."""

    logprobs: np.ndarray  # float32[n - 1], in nats
    is_likeliest: np.ndarray  # bool[n - 1]: whether no token is likelier


class Scorer:
    """A model that assigns log-probabilities to tokens.

    Args:
      config: the model; computes in its `dtype`, with a float32 softmax.
      params: parameters of a `Decoder`; may be replaced by others of the same shapes.
      most_rows: rows per pass, rounded up to a multiple of the batch shards; None: by their length.
    """

    def __init__(
        self,
        config: DecoderConfig,
        axes: MeshConfig,
        mesh: Mesh,
        params: State,
        most_rows: int | None = None,
    ) -> None:
        model = ModelOnMesh(config, axes, mesh, BATCH_AXES)
        self._row_shards = model.row_shards
        microbatches = pipeline_microbatches(axes, mesh.shape["pipeline"])
        self._row_unit = math.lcm(
            self._row_shards, microbatches * math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        )
        self._least_length = max(_SHORTEST_ROW, mesh.shape["context"])
        self.params, self._most_rows = params, most_rows

        def score(
            params: State, tokens_MxL: jax.Array, segments_MxL: jax.Array, targets_MxL: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            decoder = model.module(model.staged(params))
            x_MxLxD = decoder.hidden(tokens_MxL, segments_MxL).x_MxLxD
            scores = target_scores(decoder, x_MxLxD, targets_MxL, batch_shards=self._row_shards)
            return scores.logprobs_MxL, scores.is_likeliest_MxL

        rows = NamedSharding(mesh, P(BATCH_AXES, "context"))
        self._score = jax.jit(
            score, in_shardings=(None, rows, rows, rows), out_shardings=NamedSharding(mesh, P())
        )

    def __call__(self, rows: Sequence[np.ndarray]) -> list[RowScores]:
        """Returns the scores of each row of tokens."""
        by_row = [RowScores(np.zeros(0, np.float32), np.zeros(0, bool))] * len(rows)
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if len(row) > 1:
                length = max(self._least_length, 1 << (len(row) - 2).bit_length())
                by_length.setdefault(length, []).append(number)
        for length, numbers in by_length.items():
            most = self._row_unit * max(
                1, self._row_shards * _TOKENS_AT_ONCE // (length * self._row_unit)
            )
            most = min(most, self._whole_units(len(numbers)))
            if self._most_rows is not None:
                most = self._whole_units(self._most_rows)
            for begin in range(0, len(numbers), most):
                some = numbers[begin : begin + most]
                scores = self._batch([rows[number] for number in some], most, length)
                for number, *of_row in zip(some, *scores, strict=False):
                    by_row[number] = RowScores(
                        *(score_L[: len(rows[number]) - 1] for score_L in of_row)
                    )
        return by_row

    def _whole_units(self, rows: int) -> int:
        return self._row_unit * -(-rows // self._row_unit)

    def _batch(
        self, rows: Sequence[np.ndarray], num_rows: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens_MxL, segments_MxL, targets_MxL = np.zeros((3, num_rows, length), np.int32)
        for place, row in enumerate(rows):
            before = slice(len(row) - 1)
            tokens_MxL[place, before], targets_MxL[place, before] = row[:-1], row[1:]
            segments_MxL[place, before] = 1
        scores = jax.device_get(self._score(self.params, tokens_MxL, segments_MxL, targets_MxL))
        return cast(tuple[np.ndarray, np.ndarray], scores)
