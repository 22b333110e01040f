"""The training devices with `reproducible_sums`: an update is equal to the last bit on any number of
them.

The gradient of some pairs, and the log-probabilities of one pair, are computed by one program for
one device each. The sampler's programs depend on its devices, so the log-probabilities of its
responses are computed anew, under the policy that sampled them.

Shapes: M pairs of a chunk, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import LearnerConfig
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.rows import RowArrays
from maxbatch.kinds.prompt.learner import Learner
from maxbatch.kinds.prompt.objective import Pairs, policy_objective
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.run.compile.background import compile_here
from maxbatch.run.compile.copies import executables
from maxbatch.run.compile.flags import program_options
from maxbatch.update.model_on_mesh import ModelOnMesh
from maxbatch.update.reproducible.first import made_whole
from maxbatch.update.reproducible.programs import DevicePrograms
from maxbatch.update.reproducible.samples import SamplesAlone
from maxbatch.update.reproducible.update import ReproducibleUpdate, SumsHere
from maxbatch.update.state import TrainState, first_model
from maxbatch.update.step import StepMetrics


class PairPlacement(NamedTuple):
    """The placement of chunks of pairs, one micro-batch each: arrays [1, M, L]."""

    final: NamedSharding
    length: int

    def abstract_batch(self, shape: BatchShape) -> Pairs:
        """Returns the shapes and shardings of a chunk."""
        whole = shape.max_micro_batches, shape.micro_batch, self.length

        def form(dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(whole, dtype, sharding=self.final)

        tokens, weights = form(jnp.int32), form(jnp.float32)
        return Pairs(tokens, tokens, weights, weights, weights, weights)

    def arrange(self, micro_batch: int) -> Callable[[Pairs], Pairs]:
        """Returns the identity: chunks are staged as rows."""
        return lambda pairs: pairs

    def place(self, array_MxL: np.ndarray) -> jax.Array:
        """Puts an array that every host has whole on the devices."""
        array = array_MxL[None]
        return jax.make_array_from_callback(array.shape, self.final, array.__getitem__)


class Scoring(NamedTuple):
    """A pass that computes the log-probabilities of pairs (`SamplesAlone`)."""

    config: LearnerConfig
    placement: PairPlacement
    shape: BatchShape
    name: str = "logprobs"

    def figures_on(self, mesh: Mesh) -> Callable[[State, Pairs], jax.Array]:
        """Returns the function (parameters, pairs) -> float32[M, L]."""
        model = ModelOnMesh(self.config, self.config.mesh, mesh, BATCH_AXES)
        return lambda params, pairs: model.token_logprobs(params, pairs.tokens, pairs.segments)


class ReproducibleLearner(Learner):
    """Training on pairs, chunk by chunk, whose updates are equal to the last bit.

    Args:
      num_pairs: M.
      length: L.
    """

    def __init__(self, config: LearnerConfig, mesh: Mesh, num_pairs: int, length: int) -> None:
        super().__init__(config, mesh)
        self._mesh, shape = mesh, BatchShape(num_pairs, 1)
        options = program_options(config.libtpu_flags, list(mesh.devices.flat))
        make = partial(compile_here, options=options)
        self._executables = partial(executables, make)
        self._placement = PairPlacement(NamedSharding(mesh, P(None, BATCH_AXES)), length)
        self._update = ReproducibleUpdate(
            config,
            mesh,
            self.abstract,
            self._placement,
            shape,
            config.optimizer.reproducible_rows,
            policy_objective(config.rl),
            make,
            self._executables,
        )
        programs = DevicePrograms(mesh, make, self._executables)
        self._devices = programs.devices
        scoring = Scoring(config, self._placement, shape)
        self._scores = SamplesAlone(programs, scoring, self.abstract.model)
        self._sums_here: SumsHere | None = None

    def first_parameters(self) -> State:
        make, model = partial(first_model, self._config), self.abstract.model
        seed = self._config.init_weights_seed
        return made_whole(self._mesh, "first", make, model, seed, self._executables)()

    def place_rows(self, rows: RowArrays, policy: State | None = None) -> Pairs:
        assert policy is not None, "its log-probabilities are computed"
        arrays = {name: self._placement.place(array) for name, array in rows.items()}
        pairs = Pairs(reference_logprobs_MxL=arrays["old_logprobs_MxL"], **arrays)
        old = self._logprobs(policy, pairs)
        reference = old if self._reference is None else self._logprobs(self._reference, pairs)
        return pairs._replace(old_logprobs_MxL=old, reference_logprobs_MxL=reference)

    def _logprobs(self, params: State, pairs: Pairs) -> jax.Array:
        """Returns the log-probability of each token: float32[1, M, L]."""
        scores: Any = self._scores.under(params)(pairs)
        return self._placement.place(np.asarray(scores.addressable_data(0)))

    def add(self, state: TrainState, pairs: Pairs) -> jax.Array:
        if self._sums_here is None:
            self._sums_here = self._update.begin(state, dict.fromkeys(self._devices))
        self._update.add(self._sums_here, pairs, 1)
        # the sums are given up to the next chunk
        return jnp.copy(self._sums_here.sums[self._devices[0]].figures.tokens_1)

    def step(self, state: TrainState, settings: UpdateSettings) -> tuple[TrainState, StepMetrics]:
        assert self._sums_here is not None, "an update has a chunk"
        sums, self._sums_here = self._sums_here, None
        return self._update.step(state, sums, jax.tree.map(np.float32, settings))
