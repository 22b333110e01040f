"""The way of a run through its stages: positions and steps, in closed form per stage.

Within a stage the batch is constant, so everything here is O(stages), never O(steps). A step may straddle a threshold;
it belongs to the stage in which it starts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import NamedTuple

from maxbatch.plan.microbatches import SplitStage


class _Visit(NamedTuple):
    """A stage that the run passes through, and the (step, sample) at which it enters."""

    stage: int
    step: int
    sample: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The way of a run through its stages.

    If the plan from the start reaches the anchor, the stages before it are planned as they ran. Otherwise their steps
    are unknown, and stages count from the anchor.

    Attributes:
      split_stages: every stage, also one that is skipped or never reached.
      anchor: (step, samples_seen) from which the run goes on; (0, 0) at the start.
      steps: the run's length in updates; None: it is stated in data.
      data_end: its length in samples; None: it is stated in updates, or unknown.
      updates_per_batch: updates that one batch serves. The position advances after the last of them.
    """

    split_stages: tuple[SplitStage, ...]
    anchor: tuple[int, int]
    steps: int | None
    data_end: int | None
    updates_per_batch: int

    @functools.cached_property
    def _visits(self) -> tuple[_Visit, ...]:
        """The stages that the run passes through, from its start or from the anchor on."""
        visits = self._walk(0, 0)
        is_whole = self.split_stages[visits[-1].stage].batch > 0
        if is_whole and self._position_after(visits, self.anchor[0]) == self.anchor[1]:
            return visits
        return self._walk(*self.anchor)

    @functools.cached_property
    def totals(self) -> tuple[int | None, int | None]:
        """Updates and samples of the whole run, those behind the anchor included; None where unknown."""
        if self.data_end is not None:
            if self.anchor[1] >= self.data_end:
                return self.anchor
            visit = self._visits[bisect.bisect_left(self._visits, self.data_end, key=lambda v: v.sample) - 1]
            batches = -(-(self.data_end - visit.sample) // self.split_stages[visit.stage].batch)
            return visit.step + batches * self.updates_per_batch, self.data_end
        if self.steps is None:
            return None, None
        return (self.steps, self.position_after(self.steps)) if self.steps > self.anchor[0] else self.anchor

    def stage_at(self, samples_seen: int) -> int:
        """Returns the index of the stage in which a step that starts at samples_seen runs.

        Raises:
          ValueError: samples_seen is negative.
        """
        if samples_seen < 0:
            raise ValueError(f"sample {samples_seen} lies before the stream, which starts at 0")
        return bisect.bisect_right(self.split_stages, Fraction(samples_seen), key=lambda s: s.threshold) - 1

    def position_after(self, steps: int) -> int:
        """Returns samples_seen after so many updates of the whole run.

        A length in data ends the last batch; a length in steps does not: beyond it the plan simply goes on.

        Raises:
          ValueError: the step lies before an anchor that the plan from the start does not reach.
        """
        self._check_ahead("step", steps, self._visits[0].step)
        return self._position_after(self._visits, steps)

    def step_at(self, samples_seen: int) -> int:
        """Returns the updates that are complete when samples_seen samples have been trained on.

        Raises:
          ValueError: the position lies before an anchor that the plan from the start does not reach.
        """
        self._check_ahead("sample", samples_seen, self._visits[0].sample)
        total = self.totals[0]
        if self.data_end is not None and samples_seen >= self.data_end and total is not None:
            return total
        visit = self._visits[bisect.bisect_right(self._visits, samples_seen, key=lambda v: v.sample) - 1]
        batches = (samples_seen - visit.sample) // self.split_stages[visit.stage].batch
        return visit.step + batches * self.updates_per_batch

    def span(self, stage: int) -> tuple[int, int | None, int, int | None]:
        """Returns the first step, steps, first sample and samples of a stage; None where the end is unknown."""
        at = bisect.bisect_left(self._visits, stage, key=lambda v: v.stage)
        _, step, sample = self._visits[at]
        ends = list(self.totals)
        if self._visits[at].stage != stage:
            ends = [step, sample]  # skipped
        elif at + 1 < len(self._visits):
            _, *after = self._visits[at + 1]
            ends = [
                a if total is None else min(a, total) for a, total in zip(after, self.totals, strict=True)
            ]
        last_step, last_sample = ends
        return (
            step, None if last_step is None else max(0, last_step - step),
            sample, None if last_sample is None else max(0, last_sample - sample),
        )  # fmt: skip

    def lengths_agree(self) -> bool:
        """Returns whether the two lengths, in updates and in data, end the run at the same update and sample."""
        if self.steps is None or self.data_end is None or self.anchor[1] >= self.data_end:
            return True
        by_data = dataclasses.replace(self, steps=None).totals
        return by_data == (self.steps, dataclasses.replace(self, data_end=None).totals[1])

    def _check_ahead(self, name: str, asked: int, first: int) -> None:
        if asked < first:
            raise ValueError(
                f"{name} {asked} lies before the anchor {self.anchor}, and the steps there are unknown"
            )

    def _walk(self, step: int, sample: int) -> tuple[_Visit, ...]:
        visits = [_Visit(self.stage_at(sample), step, sample)]
        while (stage := visits[-1].stage) < len(self.split_stages) - 1:
            batch = self.split_stages[stage].batch
            if not batch:
                break
            batches = math.ceil((self.split_stages[stage + 1].threshold - sample) / batch)
            step, sample = step + batches * self.updates_per_batch, sample + batches * batch
            visits.append(_Visit(self.stage_at(sample), step, sample))
        return tuple(visits)

    def _position_after(self, visits: tuple[_Visit, ...], steps: int) -> int:
        visit = visits[bisect.bisect_right(visits, steps, key=lambda v: v.step) - 1]
        batches = (steps - visit.step) // self.updates_per_batch
        position = visit.sample + batches * self.split_stages[visit.stage].batch
        return position if self.data_end is None else min(position, max(self.data_end, visits[0].sample))
