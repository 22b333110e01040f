"""The one owner of where training stands: batch at a position, position after steps, steps, stages, the end.

The batch is a pure function of `samples_seen` at the start of a step.

In reinforcement learning a sample is a prompt: positions count prompts, a stage's batch its prompt-response pairs, and
a position advances after the last of a batch's updates.

This is Megatron-LM's rule (`--rampup-batch-size`, https://arxiv.org/abs/1909.08053) under MaxText's names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number
from maxbatch.plan.microbatches import MicrobatchUnit, SplitStage, split_stages
from maxbatch.plan.refusal import Refusal, accepted, stated
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.run_meshes import RunMeshes
from maxbatch.plan.stages import MOST_SAMPLES
from maxbatch.plan.trajectory import Trajectory

START = {"step": 0, "samples_seen": 0}  # the state of a run that has not begun


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

    A stage behind a resume that these devices cannot hold has micro-batches (and a batch that is not whole) of 0.
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


@dataclasses.dataclass(frozen=True)
class RampupBatchManager:
    """The batch over the whole run, a ramp, a schedule or a constant.

    Attributes:
      stages: every stage, also one that is skipped or never reached.
      total_steps: updates of the whole run; None where the epochs' samples are unknown.
      total_samples: samples of the whole run; None likewise.
      rows_per_sample: 1; in reinforcement learning the responses of a prompt.
    """

    stages: tuple[Stage, ...]
    total_steps: int | None
    total_samples: int | None
    rows_per_sample: int
    _trajectory: Trajectory

    @classmethod
    def from_config(
        cls,
        config: ConfigDict,
        num_devices: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
    ) -> RampupBatchManager:
        """Plans the batch of a run from its start.

        Args:
          config: the run's config.
          num_devices: N.
          num_slices: slices that the devices span.
          samples_per_epoch: samples in one pass over the training split, where it is known.

        Raises:
          ConfigError: a ramp or schedule breaks its rule, the devices cannot hold a stage, lengths disagree.
        """
        return cls.from_state(
            config, START, num_devices, num_slices=num_slices, samples_per_epoch=samples_per_epoch
        )

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
        """Plans the rest of a run from what `state_at` gave, on these devices and by this config.

        What is behind stays as it was and need not fit the devices.
        """

        def plan(config: ConfigDict) -> RampupBatchManager:
            meshes = RunMeshes.from_config(config, num_devices, num_slices)
            unit = MicrobatchUnit.from_config(config, meshes.training)
            rl = None if config.batch_size is None else RLBatch.from_config(config, meshes, unit)
            return cls.on_devices(config, unit, rl, samples_per_epoch, state)

        return accepted(config, plan)

    @classmethod
    def on_devices(
        cls,
        config: ConfigDict,
        unit: MicrobatchUnit,
        rl: RLBatch | None,
        samples_per_epoch: int | None,
        state: Mapping[str, int],
    ) -> RampupBatchManager:
        """Plans the rest of a run on devices whose unit, and whose batch of pairs, is known."""
        split: tuple[SplitStage, ...]
        if rl:
            split = (SplitStage(Fraction(0), rl.batch_size, rl.train_micro_batch_size, rl.num_micro_batches),)
        else:
            split = split_stages(config, unit, state["samples_seen"])
        trajectory = Trajectory(
            split,
            steps=config.steps,
            data_end=_data_end(config, samples_per_epoch),
            steps_per_batch=rl.num_iterations if rl else 1,
            anchor=(state["step"], state["samples_seen"]),
        )
        if not trajectory.lengths_agree():
            names = ("train_samples", "train_tokens", "num_epochs")
            other = next(stated(config, name) for name in names if config[name] is not None)
            raise Refusal(f"steps={config.steps}: must agree with {other}, stated beside it", {"steps": None})
        rows = rl.num_generations if rl else 1
        scales = _learning_rate_scales(config, split)
        return cls(
            tuple(_stage(trajectory, i, unit, rows, scales[i]) for i in range(len(split))),
            *trajectory.totals,
            rows,
            trajectory,
        )

    def state_at(self, step: int) -> dict[str, int]:
        """Returns what a checkpoint after `step` updates must hold; plain integers for JSON."""
        return {"step": step, "samples_seen": self.position_after(step)}

    def stage_at(self, samples_seen: int) -> int:
        """Returns the index of the stage in which a step that starts at samples_seen runs.

        Raises:
          ValueError: samples_seen is negative.
        """
        if samples_seen < 0:
            raise ValueError(f"sample {samples_seen} lies before the stream, which starts at 0")
        return self._trajectory.stage_at(samples_seen)

    def batch_size_at(self, samples_seen: int) -> int:
        """Returns the global batch of a step that starts at samples_seen."""
        return self.stages[self.stage_at(samples_seen)].global_batch_size

    def rows_at(self, samples_seen: int) -> int:
        """Returns the real rows of a step that starts at samples_seen: its batch, or the rest of the run."""
        batch, end = self.batch_size_at(samples_seen), self._trajectory.data_end
        return batch if end is None else max(0, min(batch, (end - samples_seen) * self.rows_per_sample))

    def position_after(self, steps: int) -> int:
        """Returns samples_seen after so many updates of the whole run.

        A length in data ends the last batch; a length in steps does not: beyond it the plan simply goes on.

        Raises:
          ValueError: the step lies behind an anchor that this plan did not lead to.
        """
        self._check_ahead("step", steps, self._trajectory.visits[0].step)
        return self._trajectory.position_after(steps)

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
        """Returns the updates that are complete when samples_seen samples have been trained on.

        Raises:
          ValueError: the position lies behind an anchor that this plan did not lead to.
        """
        self._check_ahead("sample", samples_seen, self._trajectory.visits[0].sample)
        return self._trajectory.step_at(samples_seen)

    def _check_ahead(self, name: str, asked: int, first: int) -> None:
        if asked < first:
            anchor = self._trajectory.anchor
            raise ValueError(
                f"{name} {asked} lies behind the anchor {anchor}, to which this plan did not lead"
            )


def _stage(trajectory: Trajectory, index: int, unit: MicrobatchUnit, rows: int, scale: float) -> Stage:
    """Returns a stage with its part of the run; `rows` are those of a sample."""
    own, span = trajectory.stages[index], trajectory.span(index)
    return Stage(
        per_device_batch_size=plain_number(Fraction(own.micro_batch * rows, unit.num_devices)),
        global_batch_size=own.batch * rows,
        gradient_accumulation_steps=own.accumulation_steps,
        micro_batch_size_to_train_on=own.micro_batch * rows,
        learning_rate_scale=scale,
        threshold=own.threshold,
        **span._asdict(),
    )


def _learning_rate_scales(config: ConfigDict, stages: tuple[SplitStage, ...]) -> list[float]:
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
            raise Refusal(
                f"{stated(config, key)}: adam_scaling=sde leaves nothing of it at a batch of {largest}, "
                f"{largest / reference:.3g} times reference_batch_size={reference}",
                {"reference_batch_size": needed}
                if needed <= MOST_SAMPLES and config.batch_size is None
                else {"adam_scaling": "none"},
            )
    scale = {"none": lambda ratio: 1.0, "linear": float, "sqrt": math.sqrt}[config.learning_rate_scaling]
    return [scale(Fraction(stage.batch, reference)) for stage in stages]


def _data_end(config: ConfigDict, samples_per_epoch: int | None) -> int | None:
    """Returns the samples after which a length in data ends the run; None: there is none, or it is unknown."""
    ends: dict[str, int] = {}
    if config.train_samples is not None:
        ends["train_samples"] = config.train_samples
    if config.train_tokens is not None:
        ends["train_tokens"] = -(-config.train_tokens // config.max_target_length)
    if config.num_epochs is not None and samples_per_epoch is not None:
        ends["num_epochs"] = math.ceil(exact(config.num_epochs) * samples_per_epoch)
    if not ends:
        return None
    (first, end), *others = ends.items()
    for name, other in others:
        if other != end:
            raise Refusal(
                f"{stated(config, first)}: {end} samples must agree with {stated(config, name)}, {other} samples, "
                "stated beside it",
                {name: None},
            )
    return end
