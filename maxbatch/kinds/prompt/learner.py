"""The training devices: an update as one program per chunk and one for the step.

The update is pre-training's with another objective. Chunks are trained on while the next is
sampled, so an update's sums are carried between calls, donated.

Shapes: M pairs of a chunk, L tokens.
"""

from __future__ import annotations

import copy
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import LearnerConfig
from maxbatch.data.stream.rows import RowArrays
from maxbatch.kinds.prompt.objective import Pairs, pair_rows, policy_objective
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.run.compile.compiler import jit_with
from maxbatch.run.compile.flags import program_options
from maxbatch.update.gradients import Accumulation, Sums
from maxbatch.update.lora import adapters_of
from maxbatch.update.model_on_mesh import ModelOnMesh
from maxbatch.update.state import TrainState, abstract_state, init_state
from maxbatch.update.step import StepMetrics, update


class Learner:
    """Training on pairs, chunk by chunk, on the training mesh."""

    def __init__(self, config: LearnerConfig, mesh: Mesh) -> None:
        self._config = config
        self.abstract = abstract_state(config, mesh)  # shapes and shardings of the state
        self._reference: State | None = None
        self._rows = NamedSharding(mesh, P(BATCH_AXES, "context"))
        self._sums: Sums | None = None
        accumulation = Accumulation(config, mesh, policy_objective(config.rl))

        def begin(params: State, frozen: State | None, pairs: Pairs) -> tuple[Sums, jax.Array]:
            staged = accumulation.staged(params, frozen)
            sums = accumulation.add(
                staged, accumulation.start(staged), pairs, config.optimizer.gradient_noise_scale
            )
            return sums, sums.losses_d.sum()

        def add(
            params: State, frozen: State | None, sums: Sums, pairs: Pairs
        ) -> tuple[Sums, jax.Array]:
            sums = accumulation.add(accumulation.staged(params, frozen), sums, pairs, False)
            return sums, sums.losses_d.sum()

        def step(
            state: TrainState, sums: Sums, settings: UpdateSettings
        ) -> tuple[TrainState, StepMetrics]:
            return update(
                config.optimizer, state, accumulation.total(sums), settings, accumulation.balance
            )

        model = ModelOnMesh(config, config.mesh, mesh, BATCH_AXES)

        whole = NamedSharding(mesh, P())
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        jit = jit_with(program_options(config.libtpu_flags, list(mesh.devices.flat)))
        self._begin, self._add = jit(begin), jit(add, donate_argnums=2)
        self._step = jit(step, donate_argnums=0, out_shardings=(shardings, whole))
        self._reference_logprobs = jit(model.token_logprobs)
        if adapters := adapters_of(config.adapters, config.quantization):
            merged = jit(adapters.merged, out_shardings=shardings.model)
            self._adapted = adapters.beside if adapters.are_apart else merged

    def policy(self, state: TrainState) -> State:
        """Returns the policy's parameters, with adapters."""
        return state.params if state.frozen is None else self._adapted(state.frozen, state.params)

    def referring_to(self, params: State) -> Self:
        """Returns a learner that measures the divergence (`grpo_beta`) from these parameters."""
        learner = copy.copy(self)
        learner._reference = params
        return learner

    def place(
        self,
        tokens_MxL: np.ndarray,
        mask_MxL: np.ndarray,
        logprobs_MxL: np.ndarray,
        lengths_M: np.ndarray,
        advantages_M: np.ndarray,
    ) -> Pairs:
        """Puts a chunk on the training devices, a row a pair; the arguments are those of
        `pair_rows`.
        """
        return self.place_rows(
            pair_rows(tokens_MxL, mask_MxL, logprobs_MxL, lengths_M, advantages_M)
        )

    def first_parameters(self) -> State:
        """Returns the model's parameters from the config's seed."""
        return init_state(self._config, self.abstract).params

    def place_rows(self, rows: RowArrays, policy: State | None = None) -> Pairs:
        """Puts the rows of a chunk on the training devices; pairs may share them.

        Args:
          policy: the parameters that sampled the rows, for a learner that computes log-probabilities
            anew (`ReproducibleLearner`).
        """
        arrays = {
            # every host has the whole chunk
            name: jax.make_array_from_callback(array.shape, self._rows, array.__getitem__)
            for name, array in rows.items()
        }
        reference = arrays["old_logprobs_MxL"]
        if self._reference is not None:
            reference = self._reference_logprobs(
                self._reference, arrays["tokens"], arrays["segments"]
            )
        return Pairs(reference_logprobs_MxL=reference, **arrays)

    def add(self, state: TrainState, pairs: Pairs) -> jax.Array:
        """Adds a chunk to the current update; returns a scalar that is ready when the chunk is
        done.
        """
        if self._sums is None:
            added: tuple[Sums, jax.Array] = self._begin(state.params, state.frozen, pairs)
        else:
            added = self._add(state.params, state.frozen, self._sums, pairs)
        self._sums, done = added
        return done

    def step(self, state: TrainState, settings: UpdateSettings) -> tuple[TrainState, StepMetrics]:
        assert self._sums is not None, "an update has a chunk"
        sums, self._sums = self._sums, None
        numbers = jax.tree.map(np.float32, settings)
        stepped: tuple[TrainState, StepMetrics] = self._step(state, sums, numbers)
        return stepped
