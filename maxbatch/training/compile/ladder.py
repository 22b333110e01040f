"""The compiled programs of a run: the first step's at once, all others in the background before they are needed.

A stage is planned at the largest micro-batch that fits and divides its batch. Since the update does not depend on
how the batch is cut, any executable whose micro-batch divides the planned one can run the stage as well. So the
first executable is made for the greatest common divisor of all stages ahead and can run every one of them: no stage
ever waits. The planned micro-batches of the last stage, and of every stage of `LONG_STAGE` updates or more, are
compiled in the background and taken over as soon as they are ready; a shorter stage runs on what is there.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.rampup import Stage

LONG_STAGE = 64  # updates from which on a stage is worth an executable of its own

# (name, what lowers it) -> the executable
MakeExecutable = Callable[[str, Callable[[], Any]], Any]


def compile_here(name: str, lower: Callable[[], Any]) -> Any:
    """Compiles a program; the name is of use to those who look it up instead."""
    del name
    return lower().compile()


def plan_shapes(stages: Sequence[Stage]) -> list[BatchShape]:
    """The batch shapes to compile for the stages ahead, in the order in which they are needed.

    Returns:
      The shape that can run every stage, then those of long stages and of the last, where these are others.
    """
    planned = [stage.micro_batch_size_to_train_on for stage in stages]
    own = [
        stage.micro_batch_size_to_train_on for stage in stages[:-1] if (stage.num_steps or 0) >= LONG_STAGE
    ]
    return [
        BatchShape(
            m, max(-(-s.global_batch_size // m) for s in stages if s.micro_batch_size_to_train_on % m == 0)
        )
        for m in dict.fromkeys((math.gcd(*planned), *own, planned[-1]))
    ]


class StepExecutables:
    """The compiled steps of a run.

    The first run of an executable is slower than the rest (its memory is touched for the first time), so none has
    it in the update that opens a stage: the first executable is warmed up before training, another one has its
    debut in an update within a stage, on a batch that is padded where it has to be.

    Args:
      compile_step: compiles the step for one shape; called on this thread and on another.
      stages: the stages that are still ahead.
      all_first: compile every executable before the first step. For several hosts, which must choose alike:
        `shape_for` is then a function of the stage alone.
      shapes: the shapes that there are executables for, the first of which can run every stage; None: as planned.
    """

    def __init__(
        self,
        compile_step: Callable[[BatchShape], Any],
        stages: Sequence[Stage],
        all_first: bool = False,
        shapes: Sequence[BatchShape] | None = None,
    ) -> None:
        self._compile_step = compile_step
        shapes = plan_shapes(stages) if shapes is None else list(shapes)
        self._stages = stages
        self._ready: dict[BatchShape, Any] = {}
        self._warm = shapes if all_first else shapes[:1]
        self._later = shapes[len(self._warm) :]

    def compile_first(self) -> list[tuple[BatchShape, Any]]:
        """Compiles, on this thread, what must be there before the first step; the caller warms it up.

        Returns:
          The shapes and executables: the one that can run every stage, or all of them.
        """
        for shape in self._warm:
            self._compile(shape)
        return list(self._ready.items())

    def compile_rest(self, background: Background) -> None:
        """Starts compiling what the first step does not need."""
        for shape in self._later:
            background.start(partial(self._compile, shape))

    def _compile(self, shape: BatchShape) -> None:
        self._ready[shape] = self._compile_step(shape)

    def shape_for(self, stage: Stage, opens_stage: bool) -> BatchShape:
        """The shape to give a batch of the stage, asked once for every update in turn.

        Args:
          stage: the stage of the update.
          opens_stage: whether it is the stage's first update, or the run's.

        Returns:
          The coarsest shape that can run the stage now; or one whose executable has its debut.
        """
        if not opens_stage:
            ahead = {s.micro_batch_size_to_train_on for s in self._stages if s.threshold >= stage.threshold}
            for shape in list(self._ready):
                room = shape.micro_batch * shape.max_micro_batches
                is_wanted = shape not in self._warm and shape.micro_batch in ahead
                if is_wanted and stage.global_batch_size <= room:
                    self._warm.append(shape)
                    return shape
        return max(s for s in self._warm if stage.micro_batch_size_to_train_on % s.micro_batch == 0)

    def describe(self) -> str:
        """What runs the stages, for a person: which micro-batch, and by which rule."""
        first, *own = self._warm + self._later
        parts = [f"micro-batch {first.micro_batch}, which divides every stage's"]
        for shape in own:
            is_last = shape.micro_batch == self._stages[-1].micro_batch_size_to_train_on
            why = "the last stage's" if is_last else f"planned for {LONG_STAGE} updates or more"
            parts.append(f"{shape.micro_batch}, {why}")
        return "compiled for " + "; ".join(parts)

    def __getitem__(self, shape: BatchShape) -> Any:
        return self._ready[shape]


class Background:
    """One thread that compiles what training will want later, at a priority below training's own.

    What fails there fails the run: `check` raises it. Leaving the context drops what has not begun.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "maxbatch-compile", initializer=_give_way)
        self._jobs: list[Future[Any]] = []

    def start(self, job: Callable[[], Any]) -> Future[Any]:
        self._jobs.append(self._pool.submit(job))
        return self._jobs[-1]

    def check(self) -> None:
        """Raises what a finished job failed with."""
        for job in self._jobs:
            if job.done():
                job.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _give_way() -> None:
    """Lowers the priority of the calling thread, where threads have one of their own (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
