"""The side that trains: its devices, its state, and the update cut into a program per chunk and one that steps.

The update is that of pre-training (`training.step.Update`) with another objective. Pre-training has all its rows when
it begins; here a chunk is trained on while the next one is sampled, so the sums of an update are carried from call to
call, donated, and end with it.

Shapes: M pairs of a chunk, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from maxbatch.model.loss import token_logprobs
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import activation_constraint
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.rl.objective import Pairs, policy_objective
from maxbatch.training.state import TrainState, abstract_model, abstract_state
from maxbatch.training.step import StepMetrics, Sums, Update


class Learner:
    """Trains on pairs, chunk by chunk.

    Args:
      config: the run's config.
      devices: those that train.

    Attributes:
      mesh: their mesh.
      abstract: shapes and shardings of the state.
      state: parameters and optimizer state; set by the owner before the first update.
    """

    state: TrainState

    def __init__(self, config: ConfigDict, devices: Sequence[jax.Device]) -> None:
        self.mesh = make_mesh(config, devices)
        self.abstract = abstract_state(config, self.mesh)
        self._config = config
        self._reference: nnx.State | None = None
        self._rows = NamedSharding(self.mesh, P(BATCH_AXES, "context"))
        self._sums: Sums | None = None
        update = Update(config, self.mesh, policy_objective(config))
        is_measured = config.gradient_noise_scale

        def begin(params: nnx.State, pairs: Pairs) -> tuple[Sums, jax.Array]:
            staged = update.staged(params)
            sums = update.add(staged, update.start(staged), pairs, is_measured)
            return sums, sums.losses_d.sum()

        def add(params: nnx.State, sums: Sums, pairs: Pairs) -> tuple[Sums, jax.Array]:
            sums = update.add(update.staged(params), sums, pairs, False)
            return sums, sums.losses_d.sum()

        whole = NamedSharding(self.mesh, P())
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        self._begin, self._add = jax.jit(begin), jax.jit(add, donate_argnums=1)
        self._step = jax.jit(update.step, donate_argnums=0, out_shardings=(shardings, whole))
        self._reference_logprobs = jax.jit(self._score_fn())

    def _score_fn(self) -> Any:
        graphdef, _ = abstract_model(self._config, activation_constraint(self.mesh, BATCH_AXES))
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]

        def score(params: nnx.State, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
            decoder = nnx.merge(graphdef, params)
            return token_logprobs(decoder, tokens_MxL, segments_MxL, batch_shards=shards)[0]

        return score

    def refer_to(self, params: nnx.State) -> None:
        """Measures the divergence (`grpo_beta`) from these parameters, which stay as they are."""
        self._reference = params

    def place(
        self, tokens_MxL: np.ndarray, mask_MxL: np.ndarray, logprobs_MxL: np.ndarray,
        lengths_M: np.ndarray, advantages_M: np.ndarray,
    ) -> Pairs:  # fmt: skip
        """A chunk on the devices that train.

        Args:
          tokens_MxL: int32: prompt, response, padding.
          mask_MxL: bool: where the response is; nowhere in a row that only fills the chunk.
          logprobs_MxL: float32, of the tokens when they were sampled.
          lengths_M: int32, tokens of prompt and response.
          advantages_M: float32.
        """
        segments_MxL = (np.arange(tokens_MxL.shape[1]) < lengths_M[:, None]).astype(np.int32)
        advantages_MxL = np.where(mask_MxL, advantages_M[:, None], np.float32(0))
        tokens, segments, weights, old, advantages = jax.device_put(
            (tokens_MxL, segments_MxL, mask_MxL.astype(np.float32), logprobs_MxL, advantages_MxL), self._rows
        )
        reference = old
        if self._reference is not None:
            reference = self._reference_logprobs(self._reference, tokens, segments)
        return Pairs(tokens, segments, weights, old, reference, advantages)

    def add(self, pairs: Pairs) -> jax.Array:
        """Adds a chunk to the update under way; returns a scalar that is there once the chunk is trained on."""
        if self._sums is None:
            self._sums, done = self._begin(self.state.params, pairs)
        else:
            self._sums, done = self._add(self.state.params, self._sums, pairs)
        return done

    def step(self, learning_rate: float) -> StepMetrics:
        """Takes the update of all chunks that were added."""
        assert self._sums is not None, "an update has a chunk"
        rate, ratio = jnp.float32(learning_rate), jnp.float32(1)
        self.state, metrics = self._step(self.state, self._sums, rate, ratio)
        self._sums = None
        return metrics
