"""The programs of a run, lowered from abstract shapes: nothing is allocated.

They are the same for present devices and for devices described by a compiler, so `train` and
ahead-of-time commands share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.config.combined import DecoderConfig, PlanConfig, ProgramsConfig
from maxbatch.config.recipes import slots_per_sample
from maxbatch.data.feed.placement import (
    BATCH_DTYPES,
    NUMBERED_DTYPES,
    PACKED_DTYPES,
    REFERENCE_DTYPES,
    Batch,
    BatchShape,
    Placement,
)
from maxbatch.model.attention import choose_implementation
from maxbatch.model.eight_bits import check_platform
from maxbatch.parallel.mesh import lay_out, mesh_shape
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.reproducible import check_whole_fits
from maxbatch.run.compile.background import MakeExecutable
from maxbatch.run.compile.flags import CHECKSUMS, INIT
from maxbatch.run.evaluation import Evaluator
from maxbatch.run.weights.checksums import lower_checksums
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.chips import chip_of
from maxbatch.update.gradients import Objective
from maxbatch.update.lora import adapters_of
from maxbatch.update.optimizers import OptimizerMaker
from maxbatch.update.reproducible.first import made_whole
from maxbatch.update.reproducible.programs import DevicePrograms, MakeExecutables
from maxbatch.update.reproducible.samples import SamplesAlone
from maxbatch.update.reproducible.update import ReproducibleUpdate
from maxbatch.update.state import (
    TrainState,
    abstract_state,
    adapted_shapes,
    first_model,
    init_state,
)
from maxbatch.update.step import abstract_settings, make_train_step

if TYPE_CHECKING:
    from maxbatch.update.reference import ReferencePass


def step_name(shape: BatchShape) -> str:
    """Returns the name of the compiled update for a batch shape."""
    return f"step-{shape.micro_batch}-{shape.max_micro_batches}"


def checked_mesh_shape(
    config: PlanConfig, model: DecoderConfig, devices: Sequence[jax.Device]
) -> MeshShape:
    """Returns the mesh shape of a run; call it before data are opened or programs compiled.

    Raises:
      ConfigError: the axes do not fit the devices or the model, or the devices cannot compute the
        stated `attention` or `quantization`, or reproducible sums.
    """
    shape = mesh_shape(config, devices)
    if config.optimizer.reproducible_sums and devices[0].platform == "gpu":
        raise ConfigError(
            "reproducible_sums=true: must be false on GPUs, for which the compiler chooses kernels by "
            "their measured time; works: reproducible_sums=false"
        )
    if chip := chip_of(devices[0].device_kind):
        check_whole_fits(config, chip.hbm_bytes, devices[0].device_kind)
    check_platform(model.quantization, devices[0].platform)
    choose_implementation(model, devices[0].platform, shape.sizes["context"])
    return shape


class Programs:
    """The lowered programs of a run on given devices, present or not.

    Args:
      shape: axis sizes of the mesh (`checked_mesh_shape`).
      objective: the loss to minimise, and the trained model.
      expansion: e > 1: the batch is staged by one host in e (`Placement`).
      own_optimizer: makes a user's optimizer; None: the config's.
    """

    def __init__(
        self,
        config: ProgramsConfig,
        devices: Sequence[jax.Device],
        shape: MeshShape,
        objective: Objective,
        expansion: int = 1,
        own_optimizer: OptimizerMaker | None = None,
    ) -> None:
        self.config, self._shape, self._objective = config, shape, objective
        self._own_optimizer = own_optimizer
        self.mesh: Mesh = lay_out(shape, devices)
        self._expansion = expansion
        # of a sample a row, such as those of an eval
        self.placement = self._placement(
            BATCH_DTYPES if objective.reference is None else REFERENCE_DTYPES,
            slots_per_sample(config),
        )
        # rows that a sample has on its own, if samples share rows; else 0
        self.packs = config.recipe.rows_per_sample if config.max_tokens_per_pass else 0
        self.trained_placement = self._packed_placement() if self.packs else self.placement
        # rows of the trained placement whose gradient one program computes; None: those of a pass
        optimizer, self.rows_of_atom = config.optimizer, None
        if optimizer.reproducible_sums:
            self.rows_of_atom = optimizer.reproducible_rows * max(1, self.packs)

    def _placement(self, dtypes: Mapping[str, np.dtype], length: int) -> Placement:
        return Placement(batch_sharding(self.mesh), length, self._expansion, dtypes)

    def _packed_placement(self) -> Placement:
        dtypes = dict(PACKED_DTYPES if self.packs == 1 else NUMBERED_DTYPES)
        if self._objective.reference is not None:
            dtypes |= REFERENCE_DTYPES
        return self._placement(dtypes, self.config.max_target_length)

    def reference_pass(self, batch_size: int) -> ReferencePass:
        """Returns the pass that computes the samples' reference, `batch_size` at a time."""
        reference = self._objective.reference
        assert reference is not None, "the objective has one"
        return reference.make_pass(
            self.config, self._placement(BATCH_DTYPES, slots_per_sample(self.config)), batch_size
        )

    def reference_scores(
        self, reading: ReferencePass, executable: MakeExecutable, executables: MakeExecutables
    ) -> Callable[[State], Callable[[Batch], Any]]:
        """Compiles a pass; returns the function that computes the figures of its batches under
        parameters.
        """
        if self.config.optimizer.reproducible_sums:
            programs = DevicePrograms(self.mesh, executable, executables)
            return SamplesAlone(programs, reading, self.abstract.model).under
        score = executable(reading.name, lambda: reading.lower(self.abstract.model))
        return lambda params: partial(score, params)

    @cached_property
    def abstract(self) -> TrainState:
        """The shapes, dtypes and shardings of the state."""
        return abstract_state(
            self.config, self.mesh, self._objective.make_model, self._own_optimizer
        )

    def step(self, shape: BatchShape) -> jax.stages.Lowered:
        """Returns the update for a batch shape (`make_train_step`)."""
        arrange = self.trained_placement.arrange(shape.micro_batch)
        train_step = make_train_step(
            self.config, self.mesh, self.abstract, arrange, self._objective, self._own_optimizer
        )
        count, settings = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
        batch = self.trained_placement.abstract_batch(shape)
        lowered: jax.stages.Lowered = train_step.lower(self.abstract, batch, count, settings)
        return lowered

    def reproducible_update(
        self, shape: BatchShape, executable: MakeExecutable, executables: MakeExecutables
    ) -> ReproducibleUpdate:
        """Returns the update of `reproducible_sums` for a batch shape, compiled.

        Args:
          executable: compiles a program.
          executables: compiles a program for one device, and loads it on several.
        """
        assert self.rows_of_atom is not None, "sums are reproducible"
        return ReproducibleUpdate(
            self.config,
            self.mesh,
            self.abstract,
            self.trained_placement,
            shape,
            self.rows_of_atom,
            self._objective,
            executable,
            executables,
        )

    def reproducible_init(self, executables: MakeExecutables) -> Callable[[], State]:
        """Compiles the program of the first parameters of the model or, with adapters, of these;
        returns the function that makes them.

        Their bits do not depend on the mesh: one device of each host makes them whole.
        """
        adapters, model = adapters_of(self.config.adapters), self.abstract.model
        name, make, abstract = f"{INIT}-parameters", partial(first_model, self.config), model
        if adapters is not None:
            name, make = f"{INIT}-adapters", partial(adapters.init, model)
            abstract = self.abstract.params
        seed = self.config.init_weights_seed
        return made_whole(self.mesh, name, make, abstract, seed, executables)

    def init(self) -> jax.stages.Lowered:
        """Returns the program of the initial state, from the config's seed; each device makes its
        own shard.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract._replace(spikes=None))
        init = partial(
            init_state, self.config, self.abstract, self._objective.make_model, self._own_optimizer
        )
        return jax.jit(init, out_shardings=shardings).lower()

    def compile_others(
        self, eval_batch_size: int, executable: MakeExecutable, executables: MakeExecutables
    ) -> None:
        """Compiles the other programs of a run.

        They are the initial state, the objective's reference, an eval pass and a checkpoint's
        checksums.
        """
        if self.config.optimizer.reproducible_sums:
            self.reproducible_init(executables)
        else:
            executable(INIT, self.init)
        if self._objective.reference is not None:
            reading = self.reference_pass(eval_batch_size)
            self.reference_scores(reading, executable, executables)
        if self.config.evaluation.eval_interval > 0:
            evaluator = Evaluator(
                self.config,
                self.config.evaluation,
                self.placement,
                None,
                1,
                eval_batch_size,
                self._objective,
            )
            shapes = adapted_shapes(self.config, self.abstract)
            executable(evaluator.name, lambda: evaluator.lower(shapes))
        if self.config.checkpoint.enable_checkpointing:
            executable(CHECKSUMS, lambda: lower_checksums(self.abstract.saved))
