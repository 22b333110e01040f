"""The loss on held-out data: exact, token-weighted, nothing dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import UpdateConfig
from maxbatch.config.sections import EvaluationConfig
from maxbatch.data.feed.feed import BatchLoader, in_passes
from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.data.stream.stream import Stream
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.run.compile.background import Background, MakeExecutable, compile_here
from maxbatch.update.gradients import NEXT_TOKEN, Objective
from maxbatch.update.model_on_mesh import ModelOnMesh

_Batch = tuple[int, Batch]  # with its number of real rows


class EvalResult(NamedTuple):
    """The mean loss of held-out rows, its weight, and their number."""

    loss: float  # sum of weighted token losses over sum of weights
    weight: float  # sum of loss weights
    num_rows: int


def num_evaluated(bounds: EvaluationConfig, num_rows: int, batch_size: int) -> int:
    """Returns the number of held-out rows in an eval."""
    most = math.inf if bounds.eval_steps < 0 else bounds.eval_steps * batch_size
    return int(min(num_rows, most, bounds.eval_samples or math.inf))


class Evaluator:
    """An eval of parameters on `num_rows` held-out rows, in its own batch size and without
    accumulation.

    The stream is None on a host without rows. `eval_steps` bounds the batches, `eval_samples` the
    rows; rows of zero weight pad the last batch. `until` ends the batches of an eval early, whose
    loss is then of those before.
    """

    def __init__(
        self,
        config: UpdateConfig,
        bounds: EvaluationConfig,
        placement: Placement,
        stream: Stream | None,
        num_rows: int,
        batch_size: int,
        objective: Objective = NEXT_TOKEN,
        until: Callable[[Iterator[_Batch]], Iterator[_Batch]] = iter,
    ) -> None:
        self._until = until
        mesh = placement.mesh
        model = ModelOnMesh(config, config.mesh, mesh, BATCH_AXES, objective.make_model)
        self._stream, self._placement = stream, placement
        self._shape = BatchShape(batch_size, 1)
        self._num_rows = num_evaluated(bounds, num_rows, batch_size)
        arrange = placement.arrange(batch_size)

        def eval_step(params: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
            rows = arrange(jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            sums = objective.sums(model.module(model.staged(params)), rows, model.row_shards)
            return sums.loss, sums.weight

        self._jitted = jax.jit(eval_step, out_shardings=NamedSharding(mesh, P()))
        self._compiled: Future[jax.stages.Compiled] | None = None

    def compile(
        self, abstract_params: State, background: Background, make: MakeExecutable = compile_here
    ) -> None:
        """Starts compiling before the first eval."""
        self._compiled = background.start(
            partial(make, self.name, partial(self.lower, abstract_params))
        )

    @property
    def name(self) -> str:
        """Name of the compiled program."""
        return f"eval-{self._shape.micro_batch}"

    def lower(self, abstract_params: State) -> jax.stages.Lowered:
        """Lowers the pass over one batch, for parameters of these shapes and shardings."""
        return self._jitted.lower(abstract_params, self._placement.abstract_batch(self._shape))

    def __call__(self, params: State) -> EvalResult:
        step = self._compiled.result() if self._compiled else self._jitted
        loss = weight = 0.0
        series = in_passes(0, self._num_rows, self._shape)
        with BatchLoader(self._stream, self._placement, series) as loader:
            for _, batch in self._until(loader.batches()):
                # Fetched one by one, since concurrent programs with collectives can deadlock on a
                # CPU.
                batch_loss, batch_weight = jax.device_get(step(params, batch))
                loss, weight = loss + float(batch_loss), weight + float(batch_weight)
        return EvalResult(loss / weight if weight else float("nan"), weight, self._num_rows)
