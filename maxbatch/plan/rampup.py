"""The single source of the run's position: batch at a position, position after steps, steps,
stages, the end.

The batch is a pure function of `samples_seen` at the start of a step. In reinforcement learning a
sample is a prompt: positions count prompts, a stage's batch its prompt-response pairs, and a
position advances after the last of a batch's updates. Within a stage the batch is constant, so
everything here is O(stages), never O(steps).

This is Megatron-LM's rule (`--rampup-batch-size`, https://arxiv.org/abs/1909.08053) under MaxText's
names.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.config import Config, as_plan
from maxbatch.config.values import Number, exact, plain_number
from maxbatch.plan.mesh_shape import RunMeshes
from maxbatch.plan.microbatches import MicrobatchUnit, SplitStage, split_stages
from maxbatch.plan.place import Place
from maxbatch.plan.refusal import Refusal, accepted, stated
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.seesaw import Seesaw
from maxbatch.plan.stages import MOST_SAMPLES, data_end

if TYPE_CHECKING:
    from ml_collections import ConfigDict


class Stage(NamedTuple):
    """A part of the run with one batch size.

    A stage before a resume that these devices cannot hold has 0 micro-batches, and a batch of 0 if
    it is not whole.
    """

    per_device_batch_size: Number  # rows per device in one pass, M / N
    global_batch_size: int  # samples per update
    gradient_accumulation_steps: int  # micro-batches per update
    micro_batch_size_to_train_on: int  # M, samples in one pass over all devices
    first_step: int  # updates done when the stage begins
    num_steps: int | None  # 0: skipped or not reached; None: the end is unknown
    first_sample: int  # samples seen when the stage begins
    num_samples: int | None  # trained on in the stage; None: the run's end is unknown
    learning_rate_scale: float  # `learning_rate_scaling`
    padded_slots_per_step: int  # rows of an update that are padding (`batch_padding`)
    threshold: Fraction  # samples; the first step at or after it begins the stage


class PlannedStep(NamedTuple):
    """One update of the plan: it trains on `num_rows` rows from sample `first_sample` of the stream
    on.
    """

    step: int  # number of the update, from 1
    first_sample: int  # samples_seen before it
    num_rows: int  # real rows; prompt-response pairs in reinforcement learning
    stage: int  # index into the manager's stages
    end_sample: int  # samples_seen after it; rises with the last update of a batch

    @property
    def ends_batch(self) -> bool:
        """Whether it is the last update of its batch."""
        return self.end_sample > self.first_sample


class _Visit(NamedTuple):
    """A stage that the run passes through, and the (step, sample) at which it enters."""

    stage: int
    step: int
    sample: int


@dataclasses.dataclass(frozen=True)
class RampupBatchManager:
    """The batch over the whole run: a ramp, a schedule or a constant.

    A step may straddle a threshold; it belongs to the stage in which it starts. If the plan from
    the start reaches the anchor, the stages before it are planned as they ran. Otherwise their
    steps are unknown, and stages count from it.
    """

    split_stages: tuple[SplitStage, ...]  # including those that are skipped or never reached
    # (step, samples_seen) from which the run continues; (0, 0) at the start
    anchor: tuple[int, int]
    steps: int | None  # the run's length in updates; None: it is stated in data
    data_end: int | None  # its length in samples; None: it is stated in updates, or unknown
    updates_per_batch: int  # updates per batch; the position advances after the last of them
    # updates that a batch is cut into; a batch is used updates_per_batch / num_minibatches times
    num_minibatches: int
    num_devices: int  # those that train
    rows_per_sample: int  # 1; in reinforcement learning the responses of a prompt
    learning_rate_scales: tuple[float, ...]  # of the stages
    is_seesaw: bool = False  # the stages follow from the rate, and the config names none

    @classmethod
    def from_config(
        cls,
        config: Config | ConfigDict | PlanConfig,
        num_devices: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
        anchor: tuple[int, int] = (0, 0),
    ) -> RampupBatchManager:
        """Plans the batch of a run on N devices, from `anchor` on: the stages behind need not fit
        the devices.

        `samples_per_epoch` counts the samples in one pass over the training split, where it is
        known.

        Raises:
          ConfigError: a ramp or schedule breaks its rule, the devices cannot hold a stage, lengths
            disagree.
        """

        def plan(tried: PlanConfig) -> RampupBatchManager:
            meshes = RunMeshes.from_config(tried, num_devices, num_slices)
            unit = MicrobatchUnit.from_config(tried, meshes.training)
            rl = RLBatch.if_stated(tried, meshes, unit)
            step, samples_seen = anchor
            return cls.on_devices(tried, unit, rl, samples_per_epoch, step, Place(samples_seen))

        return accepted(as_plan(config), plan)

    @classmethod
    def from_state(
        cls, config: PlanConfig, state: Mapping[str, int], num_devices: int = 1, **keywords: Any
    ) -> RampupBatchManager:
        """Plans the rest of a run from a state of `state_at`; the keywords are those of
        `from_config`.
        """
        return cls.from_config(
            config, num_devices, anchor=(state["step"], state["samples_seen"]), **keywords
        )

    @classmethod
    def on_devices(
        cls,
        config: PlanConfig,
        unit: MicrobatchUnit,
        rl: RLBatch | None,
        samples_per_epoch: int | None,
        step: int,
        place: Place,
    ) -> RampupBatchManager:
        """Plans the rest of a run, from `step` updates and a place in the stream on, on devices
        whose unit and whose batch of pairs are known.
        """
        sample = place.seen
        if rl and rl.max_prompts_per_batch is not None:
            # The prompts that a batch reads are known only afterwards, so the plan counts those of
            # its batches. A checkpoint that does not state them had batches of today's size.
            of_batches = step // rl.updates_per_batch * rl.batch_size
            sample = of_batches if place.planned is None else place.planned

        split = (rl.stage,) if rl else split_stages(config, unit, samples_seen=sample)
        manager = cls(
            split,
            (step, sample),
            steps=config.length.steps,
            data_end=data_end(config, samples_per_epoch),
            updates_per_batch=rl.updates_per_batch if rl else 1,
            num_minibatches=rl.num_minibatches if rl else 1,
            num_devices=unit.num_devices,
            rows_per_sample=rl.num_generations if rl else 1,
            learning_rate_scales=_learning_rate_scales(config, split),
            is_seesaw=Seesaw.if_stated(config) is not None,
        )

        if not manager._lengths_agree():
            names = ("train_samples", "train_tokens", "num_epochs")
            other = next(stated(config, name) for name in names if config[name] is not None)
            raise Refusal(
                config, "steps", f"must agree with {other}, stated beside it", {"steps": None}
            )
        return manager

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run; None where the samples of an epoch are unknown."""
        return self.totals[0]

    @property
    def total_samples(self) -> int | None:
        """Samples of the whole run; None where the samples of an epoch are unknown."""
        return self.totals[1]

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Every stage, including those that are skipped or never reached."""
        return tuple(self._stage(index) for index in range(len(self.split_stages)))

    @functools.cached_property
    def listed(self) -> tuple[int, ...]:
        """Numbers of the stages to list.

        A stage without updates is listed if the config states it and the run could still reach it.
        Stages before an anchor, whose updates are unknown, and those of a seesaw are not.
        """
        first = self._visits[0].stage
        with_updates = [number for number, stage in enumerate(self.stages) if stage.num_steps != 0]
        reachable = [] if self.is_seesaw else range(first, len(self.stages))
        return tuple(sorted({*with_updates, *reachable})) or (first,)

    @functools.cached_property
    def totals(self) -> tuple[int | None, int | None]:
        """Updates and samples of the whole run, including those before the anchor; None where
        unknown.
        """
        if self.data_end is not None:
            if self.anchor[1] >= self.data_end:
                return self.anchor  # the run has gone further than this length already
            # A stage entered exactly at the end has no update, so bisect from the left.
            visit = self._visits[
                bisect.bisect_left(self._visits, self.data_end, key=lambda v: v.sample) - 1
            ]
            # Rounded up: the last batch may have fewer samples.
            batches = -(-(self.data_end - visit.sample) // self.split_stages[visit.stage].batch)
            return visit.step + batches * self.updates_per_batch, self.data_end
        if self.steps is None:
            return None, None
        return (
            (self.steps, self.position_after(self.steps))
            if self.steps > self.anchor[0]
            else self.anchor
        )

    def stage_at(self, samples_seen: int) -> int:
        """Returns the index of the stage in which a step that starts at samples_seen runs.

        Raises:
          ValueError: samples_seen is negative.
        """
        if samples_seen < 0:
            raise ValueError(f"sample {samples_seen} is before the start of the stream, 0")
        return (
            bisect.bisect_right(
                self.split_stages, Fraction(samples_seen), key=lambda s: s.threshold
            )
            - 1
        )

    def position_after(self, steps: int) -> int:
        """Returns samples_seen after `step` updates of the whole run.

        A length in data ends the last batch; a length in steps does not: beyond it the plan
        continues.

        Raises:
          ValueError: the step lies before an anchor that the plan from the start does not reach.
        """
        self._check_ahead("step", steps, self._visits[0].step)
        return self._position_after(self._visits, steps)

    def step_at(self, samples_seen: int) -> int:
        """Returns the updates that are complete when samples_seen samples have been trained on.

        Raises:
          ValueError: the position lies before an anchor that the plan from the start does not
            reach.
        """
        self._check_ahead("sample", samples_seen, self._visits[0].sample)
        total = self.totals[0]
        if self.data_end is not None and samples_seen >= self.data_end and total is not None:
            return total
        visit = self._visits[
            bisect.bisect_right(self._visits, samples_seen, key=lambda v: v.sample) - 1
        ]
        batches = (samples_seen - visit.sample) // self.split_stages[visit.stage].batch
        return visit.step + batches * self.updates_per_batch

    def state_at(self, step: int) -> dict[str, int]:
        """Returns the plan's state in a checkpoint after `step` updates; plain integers for
        JSON.
        """
        return {"step": step, "samples_seen": self.position_after(step)}

    def batch_size_at(self, samples_seen: int) -> int:
        """Returns the global batch of a step that starts at samples_seen."""
        return self.split_stages[self.stage_at(samples_seen)].batch * self.rows_per_sample

    def rows_at(self, samples_seen: int) -> int:
        """Returns the real rows of the batch that starts at samples_seen, or of the rest of the
        run.
        """
        batch = self.batch_size_at(samples_seen)
        if self.data_end is None:
            return batch
        return max(0, min(batch, (self.data_end - samples_seen) * self.rows_per_sample))

    def steps_from(self, step: int) -> Iterator[PlannedStep]:
        """Yields the updates that follow the first `step` ones, to the end of the run.

        Raises:
          ValueError: the step lies before an anchor that the plan from the start does not reach.
        """
        first = self.position_after(step)
        while self.total_steps is None or step < self.total_steps:
            step, end = step + 1, self.position_after(step + 1)
            yield PlannedStep(step, first, self._rows_of(step, first), self.stage_at(first), end)
            first = end

    def _rows_of(self, step: int, first_sample: int) -> int:
        """Returns the real rows of an update, by its number from 1."""
        rows, part = (
            self.rows_at(first_sample),
            self.batch_size_at(first_sample) // self.num_minibatches,
        )
        visit = self._visits[bisect.bisect_left(self._visits, step, key=lambda v: v.step) - 1]
        # The mini-batches before this one in its batch have taken their parts of the rows. Only the
        # last batch of the run has fewer rows than its mini-batches hold.
        return max(0, min(part, rows - (step - 1 - visit.step) % self.num_minibatches * part))

    def _stage(self, index: int) -> Stage:
        split, rows = self.split_stages[index], self.rows_per_sample
        return Stage(
            plain_number(Fraction(split.micro_batch * rows, self.num_devices)),
            split.batch * rows,
            split.accumulation_steps,
            int(split.micro_batch * rows),
            *self._span(index),
            self.learning_rate_scales[index],
            int(split.padded_slots * rows) // self.num_minibatches,
            split.threshold,
        )

    def _span(self, stage: int) -> tuple[int, int | None, int, int | None]:
        """Returns first step, steps, first sample and samples of a stage."""
        # A skipped stage has no visit; the next one's place is where it would begin.
        at = bisect.bisect_left(self._visits, stage, key=lambda v: v.stage)
        _, step, sample = self._visits[at]
        ends = list(self.totals)
        if self._visits[at].stage != stage:
            ends = [step, sample]
        elif at + 1 < len(self._visits):
            pairs = zip(self._visits[at + 1][1:], self.totals, strict=True)
            ends = [after if total is None else min(after, total) for after, total in pairs]
        last_step, last_sample = ends
        return (
            step,
            None if last_step is None else max(0, last_step - step),
            sample,
            None if last_sample is None else max(0, last_sample - sample),
        )

    def _lengths_agree(self) -> bool:
        """Returns whether the two lengths, in updates and in data, end the run at the same update
        and sample.
        """
        if self.steps is None or self.data_end is None or self.anchor[1] >= self.data_end:
            return True
        by_data = dataclasses.replace(self, steps=None).totals
        return by_data == (self.steps, dataclasses.replace(self, data_end=None).totals[1])

    @functools.cached_property
    def _visits(self) -> tuple[_Visit, ...]:
        """The stages that the run passes through, from its start or from the anchor on."""
        # Earlier sessions may have had other batches: the plan from the start describes them only
        # if it leads to the anchor.
        visits = self._walk(0, 0)
        is_whole = (
            self.split_stages[visits[-1].stage].batch > 0
            and not self.anchor[0] % self.updates_per_batch
        )
        if is_whole and self._position_after(visits, self.anchor[0]) == self.anchor[1]:
            return visits
        return self._walk(*self.anchor)

    def _check_ahead(self, name: str, number: int, first: int) -> None:
        if number < first:
            raise ValueError(
                f"{name} {number} is before the anchor {self.anchor}; earlier steps are unknown"
            )

    def _walk(self, step: int, sample: int) -> tuple[_Visit, ...]:
        visits = [_Visit(self.stage_at(sample), step, sample)]
        while (stage := visits[-1].stage) < len(self.split_stages) - 1:
            batch = self.split_stages[stage].batch
            if not batch:
                break  # these devices cannot hold the stage, so the way behind it is unknown
            # Rounded up: the batch that crosses the threshold belongs to the stage it starts in.
            batches = math.ceil((self.split_stages[stage + 1].threshold - sample) / batch)
            step, sample = step + batches * self.updates_per_batch, sample + batches * batch
            visits.append(_Visit(self.stage_at(sample), step, sample))
        return tuple(visits)

    def _position_after(self, visits: tuple[_Visit, ...], steps: int) -> int:
        visit = visits[bisect.bisect_right(visits, steps, key=lambda v: v.step) - 1]
        batches = (steps - visit.step) // self.updates_per_batch
        position = visit.sample + batches * self.split_stages[visit.stage].batch
        return (
            position
            if self.data_end is None
            else min(position, max(self.data_end, visits[0].sample))
        )


def _learning_rate_scales(config: PlanConfig, stages: tuple[SplitStage, ...]) -> tuple[float, ...]:
    """Returns the factor of each stage on the learning rate: 1, or a power of batch / reference.

    Linear: Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Square root: Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997.

    Raises:
      ConfigError: adam_scaling leaves a beta that is not positive: 1 - (1 - beta) x batch /
        reference.
    """
    if seesaw := Seesaw.if_stated(config):
        return tuple(seesaw.rate_scale(stage.batch) for stage in stages)
    reference = config.rates.reference_batch_size or stages[-1].batch
    largest = max(stage.batch for stage in stages)
    for key in ("adam_b1", "adam_b2") if config.optimizer.adam_scaling == "sde" else ():
        # the smallest reference that leaves 1 - (1 - beta) x largest / reference above 0
        needed = math.floor((1 - exact(config[key])) * largest) + 1
        if reference < needed:
            times = f"{largest / reference:.3g} times reference_batch_size={reference}"
            rule = f"adam_scaling=sde lowers it to 0 or below at a batch of {largest}, {times}"
            has_reference = needed <= MOST_SAMPLES and not config.recipe.is_sampled
            works = {"reference_batch_size": needed} if has_reference else {"adam_scaling": "none"}
            raise Refusal(config, key, rule, works)
    scale = {"none": lambda ratio: 1.0, "linear": float, "sqrt": math.sqrt}[
        config.rates.learning_rate_scaling
    ]
    return tuple(scale(Fraction(stage.batch, reference)) for stage in stages)
