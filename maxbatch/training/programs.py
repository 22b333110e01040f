"""The programs of a run, lowered from abstract shapes: nothing is allocated.

They are the same for present devices and for those that only a compiler describes, so `train` and the commands that
compile ahead of time share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import jax
from jax.sharding import Mesh

from maxbatch.config.sections import CheckpointConfig, EvaluationConfig
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.model.attention import choose_implementation
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.parallel.mesh import lay_out, mesh_shape
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.plan_config import PlanConfig
from maxbatch.training.evaluation import Evaluator
from maxbatch.training.update.gradients import NEXT_TOKEN, Objective
from maxbatch.training.update.state import TrainState, abstract_state, init_state
from maxbatch.training.update.step import abstract_settings, make_train_step
from maxbatch.training.update.update_config import UpdateConfig
from maxbatch.training.weights.checksums import CHECKSUMS, lower_checksums

INIT = "init"


def step_name(shape: BatchShape) -> str:
    """Returns the name of the update on batches of a shape."""
    return f"step-{shape.micro_batch}-{shape.max_micro_batches}"


def checked_mesh_shape(config: PlanConfig, model: DecoderConfig, devices: Sequence[jax.Device]) -> MeshShape:
    """Returns the mesh shape of a run; called before data are opened or anything is compiled.

    Raises:
      ConfigError: the axes do not fit the devices or the model, or the devices cannot compute the stated `attention`.
    """
    shape = mesh_shape(config, devices)
    choose_implementation(model, devices[0].platform, shape.sizes["context"])
    return shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramsConfig(UpdateConfig):
    """The keys of the update and, of its evals and checkpoints, the keys that decide which programs a run has."""

    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig


class Programs:
    """The lowered programs of a run on given devices, present or not.

    Args:
      shape: axis sizes of their mesh (`checked_mesh_shape`).
      expansion: e > 1: the batch is staged by one host in e (`Placement`).
      objective: the loss to minimise, and the model whose parameters it trains.
    """

    def __init__(
        self,
        config: ProgramsConfig,
        devices: Sequence[jax.Device],
        shape: MeshShape,
        expansion: int = 1,
        objective: Objective = NEXT_TOKEN,
    ) -> None:
        self.config, self._shape, self._objective = config, shape, objective
        self.mesh: Mesh = lay_out(shape, devices)
        self.placement = Placement(batch_sharding(self.mesh), config.max_target_length, expansion)

    @cached_property
    def abstract(self) -> TrainState:
        """The shapes, dtypes and shardings of the state."""
        return abstract_state(self.config, self.mesh, self._objective.make_model)

    def step(self, shape: BatchShape) -> jax.stages.Lowered:
        """Returns the update on batches of a shape (`make_train_step`)."""
        arrange = self.placement.arrange(shape.micro_batch)
        train_step = make_train_step(self.config, self.mesh, self.abstract, arrange, self._objective)
        count, settings = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
        batch = self.placement.abstract_batch(shape)
        lowered: jax.stages.Lowered = train_step.lower(self.abstract, batch, count, settings)
        return lowered

    def init(self) -> jax.stages.Lowered:
        """Returns the program of the initial state, from the config's seed: each device makes its own shard."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        init = partial(init_state, self.config, self.abstract, self._objective.make_model)
        return jax.jit(init, out_shardings=shardings).lower()

    def others(self, eval_batch_size: int) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Yields the other programs of a run by name: the first state, an eval pass, the checksums of a checkpoint."""
        yield INIT, self.init()
        if self.config.evaluation.eval_interval > 0:
            evaluator = Evaluator(
                self.config, self.config.evaluation, self.placement, None, 1, eval_batch_size, self._objective
            )
            yield evaluator.name, evaluator.lower(self.abstract.model)
        if self.config.checkpoint.enable_checkpointing:
            yield CHECKSUMS, lower_checksums(self.abstract.saved)
