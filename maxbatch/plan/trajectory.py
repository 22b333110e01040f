"""The way of a run through its stages: positions and steps, in closed form per stage.

Within a stage the batch is constant, so everything here is O(stages), never O(steps). A step may straddle a threshold,
and the stage of a step is that in which it starts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import NamedTuple

from maxbatch.plan.microbatches import SplitStage


class Visit(NamedTuple):
    """A stage that the run passes through, and the (step, sample) at which it enters."""

    stage: int
    step: int
    sample: int


class Span(NamedTuple):
    """The steps and samples of a stage; None where the end of the run is unknown."""

    first_step: int
    num_steps: int | None
    first_sample: int
    num_samples: int | None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The way of a run through its stages.

    Where the plan from the very start leads to the anchor, the resume changes nothing and the stages behind are as they
    ran. Otherwise their steps are unknown, and steps and samples count from the anchor.

    Attributes:
      stages: every stage, also one that is skipped or never reached.
      steps: the run's length in updates; None: it is stated in data.
      data_end: its length in samples; None: it is stated in updates, or unknown.
      steps_per_batch: updates that one batch serves. The position advances after the last of them.
      anchor: (step, samples_seen) from which the run goes on.
    """

    stages: tuple[SplitStage, ...]
    steps: int | None
    data_end: int | None
    steps_per_batch: int
    anchor: tuple[int, int]

    @functools.cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The stages that the run passes through, from its start or from the anchor on."""
        visits = self._walk(0, 0)
        is_whole = self.stages[visits[-1].stage].batch > 0
        if is_whole and self._position_after(visits, self.anchor[0]) == self.anchor[1]:
            return visits
        return self._walk(*self.anchor)

    @functools.cached_property
    def totals(self) -> tuple[int | None, int | None]:
        """Updates and samples of the whole run, those behind the anchor included; None where unknown."""
        if self.data_end is not None:
            if self.anchor[1] >= self.data_end:
                return self.anchor
            visit = self.visits[bisect.bisect_left(self.visits, self.data_end, key=lambda v: v.sample) - 1]
            batches = -(-(self.data_end - visit.sample) // self.stages[visit.stage].batch)
            return visit.step + batches * self.steps_per_batch, self.data_end
        if self.steps is None:
            return None, None
        return (self.steps, self.position_after(self.steps)) if self.steps > self.anchor[0] else self.anchor

    def stage_at(self, samples_seen: int) -> int:
        """Returns the index of the stage in which a step that starts at samples_seen runs."""
        return bisect.bisect_right(self.stages, Fraction(samples_seen), key=lambda stage: stage.threshold) - 1

    def position_after(self, steps: int) -> int:
        """Returns samples_seen after so many updates, at least those of the first visit."""
        return self._position_after(self.visits, steps)

    def step_at(self, samples_seen: int) -> int:
        """Returns the updates that are complete at a position, at least that of the first visit."""
        total = self.totals[0]
        if self.data_end is not None and samples_seen >= self.data_end and total is not None:
            return total
        visit = self.visits[bisect.bisect_right(self.visits, samples_seen, key=lambda v: v.sample) - 1]
        batches = (samples_seen - visit.sample) // self.stages[visit.stage].batch
        return visit.step + batches * self.steps_per_batch

    def span(self, stage: int) -> Span:
        """Returns the part of the run that a stage is; empty where it is skipped or not reached."""
        at = bisect.bisect_left(self.visits, stage, key=lambda v: v.stage)
        entry, last = self.visits[at], self.totals
        if entry.stage != stage:
            last = entry.step, entry.sample
        elif at + 1 < len(self.visits):
            after = self.visits[at + 1]
            steps, samples = self.totals
            last = (
                after.step if steps is None else min(after.step, steps),
                after.sample if samples is None else min(after.sample, samples),
            )
        num_steps = None if last[0] is None else max(0, last[0] - entry.step)
        num_samples = None if last[1] is None else max(0, last[1] - entry.sample)
        return Span(entry.step, num_steps, entry.sample, num_samples)

    def lengths_agree(self) -> bool:
        """Returns whether the two lengths, in updates and in data, end the run at the same update and sample."""
        if self.data_end is None or self.anchor[1] >= self.data_end:
            return True
        by_data = dataclasses.replace(self, steps=None).totals
        by_steps = dataclasses.replace(self, data_end=None).totals
        return self.steps is None or (by_data[0], by_steps[1]) == (self.steps, self.data_end)

    def _walk(self, step: int, sample: int) -> tuple[Visit, ...]:
        visits = [Visit(self.stage_at(sample), step, sample)]
        while (stage := visits[-1].stage) < len(self.stages) - 1:
            batch = self.stages[stage].batch
            if not batch:
                break
            batches = math.ceil((self.stages[stage + 1].threshold - sample) / batch)
            step, sample = step + batches * self.steps_per_batch, sample + batches * batch
            visits.append(Visit(self.stage_at(sample), step, sample))
        return tuple(visits)

    def _position_after(self, visits: tuple[Visit, ...], steps: int) -> int:
        visit = visits[bisect.bisect_right(visits, steps, key=lambda v: v.step) - 1]
        batches = (steps - visit.step) // self.steps_per_batch
        position = visit.sample + batches * self.stages[visit.stage].batch
        return position if self.data_end is None else min(position, max(self.data_end, visits[0].sample))
