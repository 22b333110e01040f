"""(b) The cost of accumulation: 1, 4 and 16 micro-batches of equal size, and equal batches cut into
1, 4 and 16.

At equal micro-batch size every side computes 16 micro-batches: 16 updates of 1, 4 of 4, 1 of 16.
The time of the updates themselves (clipping, optimizer), measured by the same program without a
micro-batch, is subtracted, so that a shared update does not hide the cost. The ratio with updates
included is lower, and reported as well.

The model is the default one, whose update is short compared with a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from benchmarks.measurement import BenchmarkError, Measurement, ratio, seconds_in_turns
from benchmarks.trainer import QUICK_MODEL, RUN, TrainerStep, rows_of_documents
from maxbatch.config.loading import load_config
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.update.state import abstract_state
from maxbatch.update.step import abstract_settings, make_train_step

BAR = 1.05
CUTS = (1, 4, 16)


def measure(quick: bool) -> list[Measurement]:
    """Ratios of seconds, for equal work at equal micro-batch size and for one batch cut in several
    ways.
    """
    model = QUICK_MODEL if quick else ()
    config = load_config(overrides=[*model, *RUN])
    mesh = make_mesh(config)
    abstract = abstract_state(config.update, mesh)
    train_step = make_train_step(config.update, mesh, abstract)
    scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()

    placement = Placement(batch_sharding(mesh), config.max_target_length)

    def trainer(micro_batch: int, num_micro_batches: int) -> TrainerStep:
        shape = BatchShape(micro_batch, num_micro_batches)
        executable = train_step.lower(abstract, placement.abstract_batch(shape), *scalars).compile()
        return TrainerStep(config, mesh, abstract, executable, shape)

    smallest = (1 if quick else 2) * jax.device_count()
    trainers = {count: trainer(smallest, count) for count in CUTS}
    rows = {count: rows_of_documents(smallest * count, config) for count in CUTS}

    def repeated(count: int, num_micro_batches: int, times: int) -> Callable[[], None]:
        def side() -> None:
            for _ in range(times):
                trainers[count](rows[count], num_micro_batches)

        return side

    sides: dict[tuple[str, int], Callable[[], Any]] = {
        ("equal", count): repeated(count, count, CUTS[-1] // count) for count in CUTS
    }
    sides["update", 0] = repeated(CUTS[-1], 0, CUTS[-1])
    whole = {
        count: trainers[16] if count == 16 else trainer(smallest * CUTS[-1] // count, count)
        for count in CUTS
    }
    sides |= {("whole", count): partial(whole[count], rows[16], count) for count in CUTS[:-1]}
    for side in sides.values():
        side()
    seconds = seconds_in_turns(sides, turns=3 if quick else 7)
    seconds["whole", 16] = seconds["equal", 16]

    def without_updates(count: int) -> list[float]:
        pairs = zip(seconds["equal", count], seconds["update", 0], strict=True)
        return [all_of_it - updates / count for all_of_it, updates in pairs]

    if min(without_updates(1)) <= 0 and not quick:
        raise BenchmarkError(
            "an update costs as much as a micro-batch: without it there is nothing to compare"
        )
    results = []
    for count in CUTS[1:]:
        bar = BAR if count == 16 else None
        title = f"{count} micro-batches / 1, equal size"
        results += [
            ratio(f"{title}, update aside", without_updates(count), without_updates(1), bar=bar),
            ratio(f"{title}, update included", seconds["equal", count], seconds["equal", 1]),
        ]
    for count in CUTS[1:]:
        title = f"batch cut into {count} / not cut, equal batch"
        results.append(ratio(title, seconds["whole", count], seconds["whole", 1]))
    return results
