"""How the devices hold a stage: its micro-batch, its accumulation steps, and what to say where they cannot.

N devices, p rows per device, M micro-batch, B global batch = M x accumulation steps.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.config.values import Value, exact
from maxbatch.plan.divisors import largest_divisor, nearest_divisor
from maxbatch.plan.mesh_shape import MeshShape, pipeline_microbatches
from maxbatch.plan.refusal import Refusal, in_words, stated
from maxbatch.plan.stages import (
    MOST_ROWS,
    MOST_SAMPLES,
    Batches,
    StatedStage,
    nearest_multiple,
    nearest_ramp,
    ramp_numbers,
    schedule_text,
    stated_batches,
    stated_stages,
)

_MOST_PARTS = 2**20  # pipeline microbatches
_MOST_NAMED = 12


@dataclasses.dataclass(frozen=True)
class SplitStage:
    """A stage as it runs, split into micro-batches: batch = micro_batch x accumulation_steps, in samples.

    micro_batch and accumulation_steps are 0 where the devices cannot hold the stage; batch is 0 as well where
    it is not even whole.
    """

    threshold: Fraction
    batch: int
    micro_batch: int
    accumulation_steps: int


@dataclasses.dataclass(frozen=True)
class MicrobatchUnit:
    """The samples that every micro-batch is a multiple of: the batch shards times the pipeline's microbatches."""

    num_devices: int
    batch_shards: int
    num_pipeline_microbatches: int
    num_pipeline_stages: int

    @classmethod
    def from_config(cls, config: ConfigDict, mesh: MeshShape) -> MicrobatchUnit:
        """Resolves `num_pipeline_microbatches` (-1: the stages).

        Raises:
          ConfigError: it is not a multiple of the stages.
        """
        stages = mesh.num_pipeline_stages
        parts = pipeline_microbatches(config, stages)
        if parts % stages or parts > max(_MOST_PARTS, stages):
            rows = math.floor(exact(config.per_device_batch_size) * mesh.num_devices) // mesh.batch_shards
            raise Refusal(
                f"{stated(config, 'num_pipeline_microbatches')}: must be a multiple of the {stages} pipeline stages, "
                f"and at most {_MOST_PARTS}",
                {"num_pipeline_microbatches": nearest_divisor(rows, min(parts, _MOST_PARTS), stages) or -1},
            )
        return cls(mesh.num_devices, mesh.batch_shards, parts, stages)

    @property
    def rows(self) -> int:
        """The unit, in samples."""
        return self.batch_shards * self.num_pipeline_microbatches

    @property
    def rows_per_device(self) -> Fraction:
        """The unit as rows of a device."""
        return Fraction(self.rows, self.num_devices)

    def __str__(self) -> str:
        if self.num_pipeline_microbatches == 1:
            return f"the {self.batch_shards} batch shards"
        return f"{self.batch_shards} batch shards x {self.num_pipeline_microbatches} pipeline microbatches"


def split_stages(config: ConfigDict, unit: MicrobatchUnit, samples_seen: int = 0) -> tuple[SplitStage, ...]:
    """Returns how the stages of a config run on the devices.

    Args:
      config: the run's config, of pre-training.
      unit: that of the devices.
      samples_seen: samples behind. The stages behind need not fit the devices.

    Raises:
      ConfigError: a statement of the batch breaks its rule, or the devices cannot hold a stage ahead evenly.
    """
    most_rows = math.floor(exact(config.per_device_batch_size) * unit.num_devices)
    stages = tuple(_split(stage, most_rows, unit) for stage in stated_stages(config, unit.num_devices))
    ahead = bisect.bisect_right(stages, Fraction(samples_seen), key=lambda stage: stage.threshold) - 1
    unheld = [i for i in range(ahead, len(stages)) if not stages[i].micro_batch]
    if unheld:
        raise _unheld_stages(config, unit, unheld, ahead)
    return stages


def _split(stage: StatedStage, most_rows: int, unit: MicrobatchUnit) -> SplitStage:
    """Returns a stage in the micro-batch that is stated, or in the largest one up to `most_rows` that divides it."""
    micro = stage.micro_batch
    if micro is None and stage.batch % unit.rows == 0:
        units = largest_divisor(int(stage.batch) // unit.rows, most_rows // unit.rows)
        micro = Fraction(units * unit.rows)
    batch = int(stage.batch) if stage.batch.denominator == 1 else 0
    if not micro or micro % unit.rows:
        return SplitStage(stage.threshold, batch, 0, 0)
    return SplitStage(stage.threshold, batch, int(micro), int(stage.batch / micro))


def _unheld_stages(config: ConfigDict, unit: MicrobatchUnit, unheld: Sequence[int], ahead: int) -> Refusal:
    """Returns one refusal for all stages that the devices cannot hold evenly."""
    if config.enable_rampup_batch_size:
        _, a, c = ramp_numbers(config)
        rows = [(a + i * c) * unit.num_devices for i in unheld]
        named = _named([f"stage {i} ({in_words(m)})" for i, m in zip(unheld, rows, strict=True)])
        names = ("per_device_batch_size_start", "per_device_batch_size_increment")
        return Refusal(
            f"{stated(config, *names)}: every micro-batch ahead on {unit.num_devices} devices must be "
            f"divisible by {unit.rows} ({unit}), but {named} cannot",
            nearest_ramp(config, unit.rows_per_device),
        )
    batches = stated_batches(config)
    if batches is None or config.gradient_accumulation_steps is not None:
        return _unheld_micro_batch(config, unit)
    parts = _fitting_parts(config, unit, [batch for _, batch in batches[ahead:]])
    if parts is not None:
        return Refusal(
            f"{stated(config, 'num_pipeline_microbatches')}: {unit} = {unit.rows} samples must fit into one pass "
            f"({stated(config, 'per_device_batch_size')} x {unit.num_devices} devices) and divide every global batch "
            "ahead",
            {"num_pipeline_microbatches": parts},
        )
    return _unheld_batches(config, unit, batches, unheld)


def _unheld_batches(
    config: ConfigDict, unit: MicrobatchUnit, batches: Batches, unheld: Sequence[int]
) -> Refusal:
    """Returns the refusal of stated global batches: a pass cannot hold one unit, or a batch is not a multiple of it."""
    rule = f"must be divisible by {unit.rows} ({unit})"
    if exact(config.per_device_batch_size) * unit.num_devices < unit.rows:
        return Refusal(
            f"{stated(config, 'per_device_batch_size')}: x {unit.num_devices} devices must hold at least "
            f"{unit.rows} samples in one pass ({unit})",
            {"per_device_batch_size": unit.rows_per_device},
        )
    works: dict[str, Value]
    if config.batch_size_schedule is None:
        fault = f"{stated(config, 'global_batch_size')}: {rule}"
        works = {"global_batch_size": nearest_multiple(config.global_batch_size, unit.rows, MOST_SAMPLES)}
    else:
        named = _named([f"stage {i} of {batches[i][1]}" for i in unheld])
        fault = f"{stated(config, 'batch_size_schedule')}: every stage ahead {rule}, but {named} cannot"
        fitting = [(t, int(nearest_multiple(batch, unit.rows, MOST_SAMPLES))) for t, batch in batches]
        works = {"batch_size_schedule": schedule_text(fitting, config.max_target_length)}
    return Refusal(fault, works if unit.rows <= MOST_SAMPLES else {"num_pipeline_microbatches": -1})


def _fitting_parts(config: ConfigDict, unit: MicrobatchUnit, batches: Sequence[int]) -> int | None:
    """Returns the pipeline microbatches nearest to the stated ones with which the devices hold these batches.

    None: no number is stated, or none would do.
    """
    shards, common = unit.batch_shards, math.gcd(*batches)
    if config.num_pipeline_microbatches == -1 or common % shards:
        return None
    most = math.floor(exact(config.per_device_batch_size) * unit.num_devices / shards)
    parts = nearest_divisor(common // shards, unit.num_pipeline_microbatches, unit.num_pipeline_stages)
    if parts and parts > most:
        parts = largest_divisor(
            common // shards // unit.num_pipeline_stages, most // unit.num_pipeline_stages
        )
        parts *= unit.num_pipeline_stages
    return parts or None


def _unheld_micro_batch(config: ConfigDict, unit: MicrobatchUnit) -> Refusal:
    p = exact(config.per_device_batch_size)
    micro, shards = p * unit.num_devices, unit.batch_shards
    key, works = "per_device_batch_size", nearest_multiple(p, unit.rows_per_device, MOST_ROWS)
    product = f"x {unit.num_devices} devices = {in_words(micro)}"
    if micro.denominator != 1:
        rule = f"{product} must be a whole number of samples"
    elif micro % shards:
        rule = f"{product} must be divisible by the {shards} batch shards"
    else:
        rule = f"the micro-batch of {in_words(micro)} must be divisible by {unit}"
        parts = nearest_divisor(
            int(micro) // shards, unit.num_pipeline_microbatches, unit.num_pipeline_stages
        )
        if parts:
            key, works = "num_pipeline_microbatches", Fraction(parts)
    return Refusal(f"{stated(config, key)}: {rule}", {key: works})


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
