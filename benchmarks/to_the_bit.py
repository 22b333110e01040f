"""The cost of updates that are equal to the last bit (`reproducible_sums`): the same update with and
without it, in turns.
"""

from __future__ import annotations

from functools import partial

import jax

from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from benchmarks.trainer import MODEL, QUICK_MODEL, RUN, TrainerStep, rows_of_documents
from maxbatch.config.loading import load_config
from maxbatch.data.feed.placement import BatchShape
from maxbatch.parallel.mesh import mesh_shape
from maxbatch.run.compile.background import compile_here
from maxbatch.run.compile.copies import executables
from maxbatch.run.programs import Programs
from maxbatch.update.gradients import NEXT_TOKEN

BAR = 3.0
_MICRO_BATCHES = 4


def measure(quick: bool) -> list[Measurement]:
    """The ratio of seconds per update of 16 rows in four micro-batches, on one device."""
    trainers, shape = {}, BatchShape(4, _MICRO_BATCHES)
    for is_exact in ("true", "false"):
        model = QUICK_MODEL if quick else MODEL
        config = load_config(overrides=[*model, *RUN, f"reproducible_sums={is_exact}"])
        devices = jax.devices()[:1]
        programs = Programs(config.programs, devices, mesh_shape(config.plan, devices), NEXT_TOKEN)
        update = (
            programs.reproducible_update(shape, compile_here, partial(executables, compile_here))
            if is_exact == "true"
            else programs.step(shape).compile()
        )
        trainers[is_exact] = TrainerStep(config, programs.mesh, programs.abstract, update, shape)
    rows = rows_of_documents(shape.micro_batch * _MICRO_BATCHES, config)
    sides = {name: partial(trainer, rows, _MICRO_BATCHES) for name, trainer in trainers.items()}
    for side in sides.values():
        side()
    seconds = seconds_in_turns(sides, 2 if quick else 12)
    name = "update with reproducible_sums / without"
    return [ratio(name, seconds["true"], seconds["false"], bar=BAR)]
