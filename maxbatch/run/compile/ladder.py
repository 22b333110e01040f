"""The ladder of compiled steps for a ramp: the first is compiled at once, the others in the
background.

A stage is planned with the largest micro-batch that fits and divides its batch. The update does not
depend on the cut of the batch, so any step whose micro-batch divides the planned one can run the
stage too. The first step is compiled for the greatest common divisor of all stages ahead, so no
stage waits. The planned micro-batches of the last stage, and of stages of at least `LONG_STAGE`
updates, are compiled in the background and used when ready. Shorter stages run on existing steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.rampup import Stage
from maxbatch.run.compile.background import Background
from maxbatch.update.state import TrainState
from maxbatch.update.step import StepMetrics

# (state, batch, num_micro_batches, settings) -> (state, metrics)
Update = Callable[..., tuple[TrainState, StepMetrics]]
LONG_STAGE = 64  # updates from which a stage is worth its own step


def plan_shapes(stages: Sequence[Stage]) -> list[BatchShape]:
    """Returns the batch shapes to compile for the stages ahead, in order of need.

    The first runs every stage; others follow for long stages and the last stage if they differ.
    """
    long_stages = [s for s in stages if s is stages[-1] or (s.num_steps or 0) >= LONG_STAGE]
    sizes, long_sizes = (
        [s.micro_batch_size_to_train_on for s in some] for some in (stages, long_stages)
    )
    micro_batches = dict.fromkeys((math.gcd(*sizes), *long_sizes))
    return [BatchShape(m, _most_passes(m, stages)) for m in micro_batches]


def _most_passes(micro_batch: int, stages: Sequence[Stage]) -> int:
    """Returns the micro-batches that the largest batch takes; samples of several rows that share
    them may take more than their number.
    """
    planned = [
        s.gradient_accumulation_steps
        for s in stages
        if s.micro_batch_size_to_train_on == micro_batch
    ]
    return max(-(-largest_batch(micro_batch, stages) // micro_batch), *planned, 1)


def largest_batch(micro_batch: int, stages: Sequence[Stage]) -> int:
    """Returns the samples of the largest batch for a step with this micro-batch."""
    return max(
        s.global_batch_size for s in stages if s.micro_batch_size_to_train_on % micro_batch == 0
    )


class StepLadder:
    """The compiled steps of a run, by batch shape.

    A compiled step's first run is slower, because it touches its memory for the first time. This
    never happens in the update that opens a stage: the first step is warmed up before training, and
    every other step first runs within a stage, on a batch padded to its shape.

    Args:
      compile_step: compiles the step for one shape; called on this thread and on another.
      all_first: compile every step before the first update, so that `shape_for` depends on the
        stage only. Several hosts need this to choose alike.
      shapes: the shapes to compile; the first must run every stage; None: `plan_shapes` of the
        stages.
    """

    def __init__(
        self,
        compile_step: Callable[[BatchShape], Update],
        stages: Sequence[Stage],
        all_first: bool = False,
        shapes: Sequence[BatchShape] | None = None,
    ) -> None:
        self._compile_step = compile_step
        shapes = plan_shapes(stages) if shapes is None else list(shapes)
        self._stages = stages
        self._ready: dict[BatchShape, Update] = {}
        self._warm = shapes if all_first else shapes[:1]
        self._later = shapes[len(self._warm) :]

    def compile_first(self) -> list[tuple[BatchShape, Update]]:
        """Compiles the initial steps on this thread and returns them for the caller to warm up."""
        for shape in self._warm:
            self._compile(shape)
        return list(self._ready.items())

    def compile_rest(self, background: Background) -> None:
        """Starts compiling the other shapes in the background."""
        for shape in self._later:
            background.start(partial(self._compile, shape))

    def _compile(self, shape: BatchShape) -> None:
        self._ready[shape] = self._compile_step(shape)

    def shape_for(self, stage: Stage, opens_stage: bool) -> BatchShape:
        """Returns the shape for the next batch; called once per update, in order.

        A step due for its first run comes first, unless the update opens the stage (or the run);
        else the coarsest shape that can run the stage.
        """
        if not opens_stage:
            sizes_ahead = {
                s.micro_batch_size_to_train_on
                for s in self._stages
                if s.threshold >= stage.threshold
            }
            for shape in list(self._ready):
                room = shape.micro_batch * shape.max_micro_batches
                is_wanted = shape not in self._warm and shape.micro_batch in sizes_ahead
                if is_wanted and stage.global_batch_size <= room:
                    self._warm.append(shape)
                    return shape
        return max(s for s in self._warm if stage.micro_batch_size_to_train_on % s.micro_batch == 0)

    def describe(self) -> str:
        """Returns a line for users: the sizes of the compiled micro-batches and the stages that
        they run.
        """
        first, *long_sizes = (shape.micro_batch for shape in self._warm + self._later)
        use = dict.fromkeys(long_sizes, f"stages of {LONG_STAGE} updates or more")
        use[self._stages[-1].micro_batch_size_to_train_on] = "the last stage"
        others = "".join(
            f", of {size} ({stages})" for size, stages in use.items() if size in long_sizes
        )
        return f"compiled for micro-batches of {first} (any stage){others}"

    def __getitem__(self, shape: BatchShape) -> Update:
        return self._ready[shape]
