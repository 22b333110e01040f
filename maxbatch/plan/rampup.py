"""The one owner of where training stands: batch at a position, position after steps, steps, stages, the end.

The batch is a pure function of `samples_seen` at the start of a step; a step may straddle a threshold. Within
a stage the batch is constant, so everything here is closed form per stage: O(stages), never O(steps).

In reinforcement learning a sample is a prompt: positions count prompts, a stage's batch its prompt-response pairs, and
a position advances after the last of a batch's updates.

This is Megatron-LM's rule (`--rampup-batch-size`, https://arxiv.org/abs/1909.08053) under MaxText's names.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.microbatches import Cut, MicrobatchUnit, check_held, cut
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.stages import stated_stages
from maxbatch.system.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run with one batch size.

    Attributes:
      per_device_batch_size: rows per device in one pass, M / N.
      global_batch_size: samples per update.
      gradient_accumulation_steps: micro-batches per update.
      micro_batch_size_to_train_on: M, samples in one pass over all devices.
      first_step: updates done when the stage begins.
      num_steps: updates in the stage; 0 where it is skipped or not reached; None where the end is unknown.
      first_sample: samples seen when the stage begins.
      num_samples: samples trained on in the stage; None where the run's end is unknown.
      learning_rate_scale: factor on the learning rate (`learning_rate_scaling`).
      threshold: samples from which on the stage holds; the first step at or after it begins the stage.

    Of a stage behind a resume that these devices cannot hold, the cut (and a batch that is not whole) is 0.
    """

    per_device_batch_size: int | float | Fraction
    global_batch_size: int
    gradient_accumulation_steps: int
    micro_batch_size_to_train_on: int
    first_step: int
    num_steps: int | None
    first_sample: int
    num_samples: int | None
    learning_rate_scale: float
    threshold: Fraction


class PlannedStep(NamedTuple):
    """One update of the plan: it trains on `num_rows` rows from sample `first_sample` of the stream on."""

    step: int  # number of the update, from 1
    first_sample: int  # samples_seen before it
    num_rows: int  # real rows; prompt-response pairs in reinforcement learning
    stage: int  # index into the manager's stages
    end_sample: int  # samples_seen after it; rises with the last update of a batch


class _Visit(NamedTuple):
    """A stage that the run passes through, and the (step, sample) at which it enters."""

    stage: int
    step: int
    sample: int


@dataclasses.dataclass(frozen=True)
class RampupBatchManager:
    """The batch over the whole run, a ramp, a schedule or a constant.

    Attributes:
      stages: every stage, also one that is skipped or never reached.
      total_steps: updates of the whole run; None where the epochs' samples are unknown.
      total_samples: samples of the whole run; None likewise.
      anchor: (step, samples_seen) from which the plan goes on after a resume; (0, 0) at the start.
    """

    stages: tuple[Stage, ...]
    total_steps: int | None
    total_samples: int | None
    anchor: tuple[int, int]
    _plan: _Plan
    _visits: tuple[_Visit, ...]

    @classmethod
    def from_config(
        cls,
        config: ConfigDict,
        num_devices: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
        anchor: tuple[int, int] = (0, 0),
    ) -> RampupBatchManager:
        """Plan the batch of a run.

        Args:
          config: the run's config.
          num_devices: N.
          num_slices: slices that the devices span.
          samples_per_epoch: samples in one pass over the training split, where it is known.
          anchor: (step, samples_seen) of the checkpoint that the run resumes from. What is behind stays as it
            was and need not fit these devices; the plan goes on from there.

        Raises:
          ConfigError: a ramp or schedule that breaks its rule, stages ahead that the devices cannot hold,
            lengths that disagree.
        """
        rl = None
        cuts: tuple[Cut, ...]
        if config.batch_size is not None:
            rl = RLBatch.from_config(config, num_devices, num_slices)
            cuts = (Cut(Fraction(0), rl.batch_size, rl.train_micro_batch_size, rl.num_micro_batches),)
        else:
            mesh = MeshShape.from_config(config, num_devices, num_slices)
            divisor = MicrobatchUnit.from_config(config, num_devices, mesh)
            most_rows = math.floor(exact(config.per_device_batch_size) * num_devices)
            stated = stated_stages(config, num_devices, Fraction(divisor.rows, num_devices))
            cuts = tuple(cut(target, most_rows, divisor) for target in stated)
            check_held(config, num_devices, divisor, cuts, ahead=_stage_at(cuts, anchor[1]))
        reference = config.reference_batch_size or cuts[-1].batch
        if config.adam_scaling == "sde":
            _check_adam_scaling(config, max(c.batch for c in cuts), reference)
        scale = _SCALES[config.learning_rate_scaling]
        plan = _Plan(
            cuts=cuts,
            scales=tuple(scale(Fraction(c.batch, reference)) for c in cuts),
            num_devices=rl.num_trainer_devices if rl else num_devices,
            steps=config.steps,
            data_end=_data_end(config, samples_per_epoch),
            rows_per_sample=rl.num_generations if rl else 1,
            steps_per_batch=rl.num_iterations if rl else 1,
        )
        manager = plan.anchored(anchor)
        if plan.steps is not None and plan.data_end is not None and not manager._lengths_agree():
            raise ConfigError(
                f"steps={plan.steps}: must agree with {_length_in_data(config)}, stated beside it; works: steps=null"
            )
        return manager

    @classmethod
    def from_state(
        cls,
        config: ConfigDict,
        state: Mapping[str, int],
        num_devices: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
    ) -> RampupBatchManager:
        """Plan the rest of a run from what `state_at` gave, on these devices and by this config."""
        anchor = (state["step"], state["samples_seen"])
        return cls.from_config(
            config, num_devices, num_slices=num_slices, samples_per_epoch=samples_per_epoch, anchor=anchor
        )

    def state_at(self, step: int) -> dict[str, int]:
        """Return what a checkpoint after `step` updates must hold; plain integers for JSON."""
        return {"step": step, "samples_seen": self.position_after(step)}

    def resumed_at(self, step: int, samples_seen: int) -> RampupBatchManager:
        """Return the same plan, going on from (step, samples_seen)."""
        return self._plan.anchored((step, samples_seen))

    def stage_at(self, samples_seen: int) -> int:
        """Return the index of the stage in which a step that starts at samples_seen runs.

        Raises:
          ValueError: samples_seen is negative.
        """
        if samples_seen < 0:
            raise ValueError(f"sample {samples_seen} lies before the stream, which starts at 0")
        return bisect.bisect_right(self.stages, Fraction(samples_seen), key=lambda stage: stage.threshold) - 1

    def batch_size_at(self, samples_seen: int) -> int:
        """Return the global batch of a step that starts at samples_seen."""
        return self.stages[self.stage_at(samples_seen)].global_batch_size

    def rows_at(self, samples_seen: int) -> int:
        """Return the real rows of a step that starts at samples_seen: its batch, or the rest of the run."""
        plan = self._plan
        batch, end = plan.cuts[self.stage_at(samples_seen)].batch, plan.data_end
        return (batch if end is None else max(0, min(batch, end - samples_seen))) * plan.rows_per_sample

    def position_after(self, steps: int) -> int:
        """Return samples_seen after so many updates of the whole run.

        A length in data ends the last batch; a length in steps does not: beyond it the plan simply goes on.

        Raises:
          ValueError: the step lies behind an anchor that this plan did not lead to.
        """
        if steps < self._visits[0].step:
            raise ValueError(
                f"step {steps} lies behind the anchor {self.anchor}, to which this plan did not lead"
            )
        return self._plan.position_after(self._visits, steps)

    def steps_from(self, step: int) -> Iterator[PlannedStep]:
        """Yields the updates that follow the first `step` ones, to the end of the run.

        Raises:
          ValueError: the step lies behind an anchor that this plan did not lead to.
        """
        first_sample = self.position_after(step)
        while self.total_steps is None or step < self.total_steps:
            step += 1
            end_sample = self.position_after(step)
            yield PlannedStep(
                step, first_sample, self.rows_at(first_sample), self.stage_at(first_sample), end_sample
            )
            first_sample = end_sample

    def step_at(self, samples_seen: int) -> int:
        """Return the updates that are complete when samples_seen samples have been trained on.

        Raises:
          ValueError: the position lies behind an anchor that this plan did not lead to.
        """
        if samples_seen < self._visits[0].sample:
            raise ValueError(
                f"sample {samples_seen} lies behind the anchor {self.anchor}, to which this plan did not lead"
            )
        if self._plan.data_end is not None and samples_seen >= self._plan.data_end:
            assert self.total_steps is not None
            return self.total_steps
        visit = self._visits[bisect.bisect_right(self._visits, samples_seen, key=lambda v: v.sample) - 1]
        batches = (samples_seen - visit.sample) // self._plan.cuts[visit.stage].batch
        return visit.step + batches * self._plan.steps_per_batch

    def _lengths_agree(self) -> bool:
        steps, end = self._plan.steps, self._plan.data_end
        by_data = dataclasses.replace(self._plan, steps=None).anchored(self.anchor)
        by_steps = dataclasses.replace(self._plan, data_end=None).anchored(self.anchor)
        return self.anchor[1] >= (end or 0) or (
            by_data.total_steps == steps and by_steps.total_samples == end
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a manager is made of, wherever it is anchored."""

    cuts: tuple[Cut, ...]
    scales: tuple[float, ...]
    num_devices: int
    steps: int | None
    data_end: int | None
    rows_per_sample: int  # 1; in reinforcement learning the responses of a prompt
    steps_per_batch: (
        int  # 1; in reinforcement learning the updates of a batch, which ends with the last of them
    )

    def anchored(self, anchor: tuple[int, int]) -> RampupBatchManager:
        """Return the manager that goes on from the anchor.

        Where the plan from the very start leads to the anchor, the resume changes nothing and the stages
        behind are shown as they ran. Otherwise their steps are unknown, and the table counts from the anchor.
        """
        visits = self._walk(0, 0)
        if not self.cuts[visits[-1].stage].batch or self.position_after(visits, anchor[0]) != anchor[1]:
            visits = self._walk(*anchor)
        total_steps, total_samples = self._totals(visits, anchor)
        stages = tuple(self._stage(i, visits, total_steps, total_samples) for i in range(len(self.cuts)))
        return RampupBatchManager(stages, total_steps, total_samples, anchor, self, tuple(visits))

    def _walk(self, step: int, sample: int) -> list[_Visit]:
        """Return the stages that a run from (step, sample) on passes through, in O(stages)."""
        visits = [_Visit(_stage_at(self.cuts, sample), step, sample)]
        while (stage := visits[-1].stage) < len(self.cuts) - 1:
            batch = self.cuts[stage].batch
            if not batch:
                break
            steps = math.ceil((self.cuts[stage + 1].threshold - sample) / batch)
            step, sample = step + steps * self.steps_per_batch, sample + steps * batch
            visits.append(_Visit(_stage_at(self.cuts, sample), step, sample))
        return visits

    def position_after(self, visits: Sequence[_Visit], steps: int) -> int:
        """Return samples_seen after so many updates, at least those of the first visit."""
        visit = visits[bisect.bisect_right(visits, steps, key=lambda v: v.step) - 1]
        batches = (steps - visit.step) // self.steps_per_batch
        position = visit.sample + batches * self.cuts[visit.stage].batch
        return position if self.data_end is None else min(position, max(self.data_end, visits[0].sample))

    def _totals(self, visits: Sequence[_Visit], anchor: tuple[int, int]) -> tuple[int | None, int | None]:
        if self.data_end is not None:
            if anchor[1] >= self.data_end:
                return anchor
            visit = visits[bisect.bisect_left(visits, self.data_end, key=lambda v: v.sample) - 1]
            rest = -(-(self.data_end - visit.sample) // self.cuts[visit.stage].batch)
            return visit.step + rest * self.steps_per_batch, self.data_end
        if self.steps is None:
            return None, None
        return (self.steps, self.position_after(visits, self.steps)) if self.steps > anchor[0] else anchor

    def _stage(
        self, index: int, visits: Sequence[_Visit], total_steps: int | None, total_samples: int | None
    ) -> Stage:
        at = bisect.bisect_left(visits, index, key=lambda v: v.stage)
        entry, after = visits[at], visits[at + 1] if at + 1 < len(visits) else None
        last_step, last_sample = total_steps, total_samples
        if entry.stage != index:
            last_step, last_sample = entry.step, entry.sample
        elif after is not None:
            last_step = after.step if total_steps is None else min(after.step, total_steps)
            last_sample = after.sample if total_samples is None else min(after.sample, total_samples)
        own = self.cuts[index]
        micro_batch = own.micro_batch * self.rows_per_sample
        return Stage(
            per_device_batch_size=plain_number(Fraction(micro_batch, self.num_devices)),
            global_batch_size=own.batch * self.rows_per_sample,
            gradient_accumulation_steps=own.accumulation_steps,
            micro_batch_size_to_train_on=micro_batch,
            first_step=entry.step,
            num_steps=None if last_step is None else max(0, last_step - entry.step),
            first_sample=entry.sample,
            num_samples=None if last_sample is None else max(0, last_sample - entry.sample),
            learning_rate_scale=self.scales[index],
            threshold=own.threshold,
        )


def _check_adam_scaling(config: ConfigDict, largest_batch: int, reference: int) -> None:
    """Raise ConfigError where a beta would not be positive: 1 - (1 - beta) x batch / reference."""
    for key in ("adam_b1", "adam_b2"):
        room = 1 - exact(config[key])
        if room * largest_batch >= reference:
            works = math.floor(room * largest_batch) + 1
            raise ConfigError(
                f"{key}={config[key]}: adam_scaling=sde leaves nothing of it at a batch of {largest_batch}, "
                f"{largest_batch / reference:.3g} times reference_batch_size={reference}; "
                f"works: reference_batch_size={works}"
            )


# Linear: Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Square root: Krizhevsky 2014,
# https://arxiv.org/abs/1404.5997.
_SCALES = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: float(ratio),
    "sqrt": lambda ratio: math.sqrt(ratio),
}


def _stage_at(cuts: Sequence[Cut], samples_seen: int) -> int:
    return bisect.bisect_right(cuts, Fraction(samples_seen), key=lambda c: c.threshold) - 1


def _length_in_data(config: ConfigDict) -> str:
    key = next(key for key in ("train_samples", "train_tokens", "num_epochs") if config[key] is not None)
    return f"{key}={config[key]}"


def _data_end(config: ConfigDict, samples_per_epoch: int | None) -> int | None:
    """Return the samples after which a length in data ends the run; None: there is none, or unknown."""
    ends: dict[str, int] = {}
    if config.train_samples is not None:
        ends["train_samples"] = config.train_samples
    if config.train_tokens is not None:
        ends["train_tokens"] = -(-config.train_tokens // config.max_target_length)
    if config.num_epochs is not None and samples_per_epoch is not None:
        ends["num_epochs"] = math.ceil(exact(config.num_epochs) * samples_per_epoch)
    if len(set(ends.values())) > 1:
        (first, end), *others = ends.items()
        name, other = next((name, other) for name, other in others if other != end)
        raise ConfigError(
            f"{first}={config[first]}: {end} samples must agree with {name}={config[name]}, {other} samples, "
            f"stated beside it; works: {name}=null"
        )
    return next(iter(ends.values()), None)
