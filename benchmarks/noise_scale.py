"""(g) The cost of measuring the gradient noise scale: the same update with and without it, in
turns.
"""

from __future__ import annotations

from functools import partial

import jax

from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from benchmarks.trainer import MODEL, QUICK_MODEL, RUN, TrainerStep, rows_of_documents
from maxbatch.config.loading import load_config
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.update.state import abstract_state
from maxbatch.update.step import abstract_settings, make_train_step

BAR = 1.01
_MICRO_BATCHES = 4


def measure(quick: bool) -> list[Measurement]:
    """The ratio of seconds per update, four micro-batches each."""
    scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
    trainers = {}
    for measures in ("true", "false"):
        model = QUICK_MODEL if quick else MODEL
        config = load_config(overrides=[*model, *RUN, f"gradient_noise_scale={measures}"])
        mesh = make_mesh(config)
        abstract = abstract_state(config.update, mesh)
        shape = BatchShape(2 * jax.device_count(), _MICRO_BATCHES)
        staged = Placement(batch_sharding(mesh), config.max_target_length).abstract_batch(shape)
        executable = (
            make_train_step(config.update, mesh, abstract)
            .lower(abstract, staged, *scalars)
            .compile()
        )
        trainers[measures] = TrainerStep(config, mesh, abstract, executable, shape)
    rows = rows_of_documents(shape.micro_batch * _MICRO_BATCHES, config)
    sides = {name: partial(trainer, rows, _MICRO_BATCHES) for name, trainer in trainers.items()}
    for side in sides.values():
        side()
    seconds = seconds_in_turns(sides, 2 if quick else 12)
    return [ratio("update with noise scale / without", seconds["true"], seconds["false"], bar=BAR)]
