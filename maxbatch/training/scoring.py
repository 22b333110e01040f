"""Log-probabilities of given tokens, batched, on any mesh.

Rows of about one length share a program: each length is rounded up to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.sections import MeshConfig
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.model.loss import token_logprobs
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES, pipeline_microbatches
from maxbatch.training.update.model_on_mesh import ModelOnMesh

_SHORTEST_ROW = 16
_TOKENS_AT_ONCE = 4096  # of a batch shard


class Scorer:
    """A model that assigns log-probabilities to tokens.

    Args:
      config: the model; its `dtype` is used to compute; the softmax is float32.
      axes: the axes of the mesh.
      mesh: the mesh of the parameters.
      params: parameters of a `Decoder`.
    """

    def __init__(self, config: DecoderConfig, axes: MeshConfig, mesh: Mesh, params: State) -> None:
        model = ModelOnMesh(config, axes, mesh, BATCH_AXES)
        self._row_shards = model.row_shards
        parts = pipeline_microbatches(axes, mesh.shape["pipeline"])
        self._row_unit = math.lcm(self._row_shards, parts * math.prod(mesh.shape[axis] for axis in BATCH_AXES))
        self._least_length = max(_SHORTEST_ROW, mesh.shape["context"])
        self._params = params

        def score(params: State, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
            decoder = model.module(model.staged(params))
            return token_logprobs(decoder, tokens_MxL, segments_MxL, batch_shards=self._row_shards)[0]

        rows = NamedSharding(mesh, P(BATCH_AXES, "context"))
        self._score = jax.jit(score, in_shardings=(None, rows, rows), out_shardings=NamedSharding(mesh, P()))

    def __call__(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns float32[n - 1] for each row of n tokens: of each token after the first, given those before it."""
        found = [np.zeros(0, np.float32)] * len(rows)
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if len(row) > 1:
                length = max(self._least_length, 1 << (len(row) - 1).bit_length())
                by_length.setdefault(length, []).append(number)
        for length, numbers in by_length.items():
            most = self._row_unit * max(1, self._row_shards * _TOKENS_AT_ONCE // (length * self._row_unit))
            most = min(most, self._row_unit * -(-len(numbers) // self._row_unit))
            for begin in range(0, len(numbers), most):
                some = numbers[begin : begin + most]
                logprobs_MxL = self._batch([rows[number] for number in some], most, length)
                for number, logprobs_L in zip(some, logprobs_MxL, strict=False):
                    found[number] = logprobs_L[1 : len(rows[number])]
        return found

    def _batch(self, rows: Sequence[np.ndarray], num_rows: int, length: int) -> np.ndarray:
        tokens_MxL, segments_MxL = np.zeros((2, num_rows, length), np.int32)
        for place, row in enumerate(rows):
            tokens_MxL[place, : len(row)] = row
            segments_MxL[place, : len(row)] = 1
        array: np.ndarray = jax.device_get(self._score(self._params, tokens_MxL, segments_MxL))
        return array
