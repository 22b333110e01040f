"""The one owner of where training stands: batch at a position, position after steps, steps, stages, the end.

The batch is a pure function of `samples_seen` at the start of a step. In reinforcement learning a sample is a prompt:
positions count prompts, a stage's batch its prompt-response pairs, and a position advances after the last of a batch's
updates.

This is Megatron-LM's rule (`--rampup-batch-size`, https://arxiv.org/abs/1909.08053) under MaxText's names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from maxbatch.config.values import Number, exact, plain_number
from maxbatch.plan.microbatches import MicrobatchUnit, SplitStage, split_stages
from maxbatch.plan.refusal import Refusal, accepted, stated
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.run_meshes import RunMeshes
from maxbatch.plan.stages import MOST_SAMPLES, data_end
from maxbatch.plan.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run with one batch size.

    A stage behind a resume that these devices cannot hold has micro-batches (and a batch that is not whole) of 0.

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
    """

    per_device_batch_size: Number
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


@dataclasses.dataclass(frozen=True)
class RampupBatchManager(Trajectory):
    """The batch over the whole run, a ramp, a schedule or a constant.

    Attributes:
      num_devices: those that train.
      rows_per_sample: 1; in reinforcement learning the responses of a prompt.
      learning_rate_scales: factor of each stage on the learning rate.
    """

    num_devices: int
    rows_per_sample: int
    learning_rate_scales: tuple[float, ...]

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
        """Plans the batch of a run.

        Args:
          config: the run's config.
          num_devices: N.
          num_slices: slices that the devices span.
          samples_per_epoch: samples in one pass over the training split, where it is known.
          anchor: (step, samples_seen) from which the run goes on. The stages behind need not fit the devices.

        Raises:
          ConfigError: a ramp or schedule breaks its rule, the devices cannot hold a stage, lengths disagree.
        """

        def plan(config: ConfigDict) -> RampupBatchManager:
            meshes = RunMeshes.from_config(config, num_devices, num_slices)
            unit = MicrobatchUnit.from_config(config, meshes.training)
            return cls.on_devices(
                config, unit, RLBatch.if_stated(config, meshes, unit), samples_per_epoch, anchor
            )

        return accepted(config, plan)

    @classmethod
    def from_state(
        cls, config: ConfigDict, state: Mapping[str, int], num_devices: int = 1, **keywords: Any
    ) -> RampupBatchManager:
        """Plans the rest of a run from what `state_at` gave; the keywords are those of `from_config`."""
        return cls.from_config(config, num_devices, anchor=(state["step"], state["samples_seen"]), **keywords)

    @classmethod
    def on_devices(
        cls,
        config: ConfigDict,
        unit: MicrobatchUnit,
        rl: RLBatch | None,
        samples_per_epoch: int | None,
        anchor: tuple[int, int],
    ) -> RampupBatchManager:
        """Plans the rest of a run on devices whose unit and whose batch of pairs are known."""
        split = (rl.stage,) if rl else split_stages(config, unit, samples_seen=anchor[1])
        manager = cls(
            split,
            anchor,
            steps=config.steps,
            data_end=data_end(config, samples_per_epoch),
            updates_per_batch=rl.num_iterations if rl else 1,
            num_devices=unit.num_devices,
            rows_per_sample=rl.num_generations if rl else 1,
            learning_rate_scales=_learning_rate_scales(config, split),
        )
        if not manager.lengths_agree():
            names = ("train_samples", "train_tokens", "num_epochs")
            other = next(stated(config, name) for name in names if config[name] is not None)
            raise Refusal(config, "steps", f"must agree with {other}, stated beside it", {"steps": None})
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
        """Every stage, also one that is skipped or never reached."""
        return tuple(self._stage(index) for index in range(len(self.split_stages)))

    def _stage(self, index: int) -> Stage:
        own, rows = self.split_stages[index], self.rows_per_sample
        return Stage(
            plain_number(Fraction(own.micro_batch * rows, self.num_devices)),
            own.batch * rows,
            own.accumulation_steps,
            own.micro_batch * rows,
            *self.span(index),
            self.learning_rate_scales[index],
            own.threshold,
        )

    def state_at(self, step: int) -> dict[str, int]:
        """Returns what a checkpoint after `step` updates must hold; plain integers for JSON."""
        return {"step": step, "samples_seen": self.position_after(step)}

    def batch_size_at(self, samples_seen: int) -> int:
        """Returns the global batch of a step that starts at samples_seen."""
        return self.split_stages[self.stage_at(samples_seen)].batch * self.rows_per_sample

    def rows_at(self, samples_seen: int) -> int:
        """Returns the real rows of a step that starts at samples_seen: its batch, or the rest of the run."""
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
            yield PlannedStep(step, first, self.rows_at(first), self.stage_at(first), end)
            first = end


def _learning_rate_scales(config: ConfigDict, stages: tuple[SplitStage, ...]) -> tuple[float, ...]:
    """Returns the factor of each stage on the learning rate: 1, or a power of batch / reference.

    Linear: Goyal et al. 2017, https://arxiv.org/abs/1706.02677. Square root: Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997.

    Raises:
      ConfigError: adam_scaling leaves a beta that is not positive: 1 - (1 - beta) x batch / reference.
    """
    reference = config.reference_batch_size or stages[-1].batch
    largest = max(stage.batch for stage in stages)
    for key in ("adam_b1", "adam_b2") if config.adam_scaling == "sde" else ():
        needed = math.floor((1 - exact(config[key])) * largest) + 1
        if reference < needed:
            rule = (
                f"adam_scaling=sde leaves nothing of it at a batch of {largest}, {largest / reference:.3g} times "
                f"reference_batch_size={reference}"
            )
            has_reference = needed <= MOST_SAMPLES and config.batch_size is None
            raise Refusal(
                config,
                key,
                rule,
                {"reference_batch_size": needed} if has_reference else {"adam_scaling": "none"},
            )
    scale = {"none": lambda ratio: 1.0, "linear": float, "sqrt": math.sqrt}[config.learning_rate_scaling]
    return tuple(scale(Fraction(stage.batch, reference)) for stage in stages)
