"""How the devices hold a stage: its micro-batch, its accumulation steps, and the error if they
cannot.

N devices, p rows per device, M micro-batch, B global batch = M x accumulation steps.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.values import Value, exact, first_of
from maxbatch.plan.divisors import largest_divisor, nearest_divisor
from maxbatch.plan.mesh_shape import MeshShape, pipeline_microbatches
from maxbatch.plan.refusal import MOST_TYPED, Refusal, in_words, stated
from maxbatch.plan.seesaw import Seesaw
from maxbatch.plan.stages import (
    MOST_ROWS,
    MOST_SAMPLES,
    Batches,
    StatedStage,
    constant_batch,
    nearest_multiple,
    nearest_ramp,
    pass_rows,
    ramp_numbers,
    stated_batches,
    stated_schedule,
    stated_stages,
    tokens_text,
)

_MOST_PARTS = 2**20  # pipeline microbatches
_MOST_NAMED = 12


class SplitStage(NamedTuple):
    """A stage as it runs, split into micro-batches, in samples: batch = micro_batch x
    accumulation_steps.

    With `batch_padding` it may be less, and the last micro-batch ends in rows of padding.
    micro_batch and accumulation_steps are 0 where the devices cannot hold the stage; batch is 0 as
    well where it is not even whole.
    """

    threshold: Fraction
    batch: int
    # a fraction where a sample is a prompt of several rows, and they are padded
    micro_batch: int | Fraction
    accumulation_steps: int
    # whether samples share rows (`max_tokens_per_pass`): micro_batch counts rows, and
    # accumulation_steps are those of a row a sample, the most that lengths can need
    is_packed: bool = False

    @property
    def padded_slots(self) -> int | Fraction:
        """Samples of a batch that are padding; 0 if passes follow from lengths."""
        if self.is_packed:
            return 0
        return self.micro_batch * self.accumulation_steps - self.batch if self.micro_batch else 0


class MicrobatchUnit(NamedTuple):
    """The samples that every micro-batch is a multiple of: the batch shards times the pipeline's
    microbatches.
    """

    num_devices: int
    batch_shards: int
    num_pipeline_microbatches: int
    num_pipeline_stages: int

    @classmethod
    def from_config(cls, config: PlanConfig, mesh: MeshShape) -> MicrobatchUnit:
        """Resolves `num_pipeline_microbatches` (-1: the stages); raises ConfigError unless the
        stages divide it.
        """
        key, stages = "num_pipeline_microbatches", mesh.num_pipeline_stages
        pipeline_parts = pipeline_microbatches(config.mesh, stages)
        if pipeline_parts % stages or pipeline_parts > max(_MOST_PARTS, stages):
            rows = math.floor(pass_rows(config, mesh.num_devices)) // mesh.batch_shards
            rule = f"must be a multiple of the {stages} pipeline stages, and at most {_MOST_PARTS}"
            works = nearest_divisor(rows, min(pipeline_parts, _MOST_PARTS), stages) or -1
            raise Refusal(config, key, rule, {key: works})
        return cls(mesh.num_devices, mesh.batch_shards, pipeline_parts, stages)

    @property
    def rows(self) -> int:
        """The unit, in samples."""
        return self.batch_shards * self.num_pipeline_microbatches

    @property
    def rows_per_device(self) -> Fraction:
        return Fraction(self.rows, self.num_devices)

    def __str__(self) -> str:
        if self.num_pipeline_microbatches == 1:
            return f"the {self.batch_shards} batch shards"
        return (
            f"{self.batch_shards} batch shards x {self.num_pipeline_microbatches} pipeline "
            "microbatches"
        )


def split_stages(
    config: PlanConfig, unit: MicrobatchUnit, samples_seen: int
) -> tuple[SplitStage, ...]:
    """Returns how the stages of pre-training run on devices; stages before `samples_seen` need not
    fit.

    Raises:
      ConfigError: a statement of the batch breaks its rule, or the devices cannot hold a stage
        ahead evenly.
    """
    most_rows = math.floor(pass_rows(config, unit.num_devices))
    stated_ones = stated_stages(config, unit.num_devices)
    split = _padded if config.batch.batch_padding else _split
    if config.batch.max_tokens_per_pass is not None:
        # the same pass in all stages, so that one program runs them
        per_sample = config.recipe.rows_per_sample
        largest = max(int(stage.batch) for stage in stated_ones)
        most_rows = held_rows(config, unit, per_sample * largest, per_sample)
        split = functools.partial(_packed, rows_per_sample=per_sample)
    stages = tuple(split(stage, most_rows, unit) for stage in stated_ones)
    current = (
        bisect.bisect_right(stages, Fraction(samples_seen), key=lambda stage: stage.threshold) - 1
    )
    unheld = [i for i in range(current, len(stages)) if not stages[i].micro_batch]
    if not unheld:
        return stages

    batches = stated_batches(config)
    if config.ramp.enable_rampup_batch_size:
        raise _unheld_ramp(config, unit, unheld)
    if batches is None or config.batch.gradient_accumulation_steps is not None:
        raise _unheld_micro_batch(config, unit)
    raise _unheld_batches(config, unit, batches, unheld, current)


def _split(stage: StatedStage, most_rows: int, unit: MicrobatchUnit) -> SplitStage:
    """Returns a stage with the stated micro-batch, or with the largest one up to `most_rows` that
    divides it.
    """
    micro = stage.micro_batch
    if micro is None and stage.batch % unit.rows == 0:
        units = largest_divisor(int(stage.batch) // unit.rows, most_rows // unit.rows)
        micro = Fraction(units * unit.rows)
    batch = int(stage.batch) if stage.batch.denominator == 1 else 0
    if not micro or micro % unit.rows:
        return SplitStage(stage.threshold, batch, 0, 0)
    return SplitStage(stage.threshold, batch, int(micro), int(stage.batch / micro))


def _padded(stage: StatedStage, most_rows: int, unit: MicrobatchUnit) -> SplitStage:
    """Returns a stage in the fewest passes, with the fewest rows per pass that hold the batch.

    Every pass then has a real row. A stage whose passes are stated is split as without padding.
    """
    most = most_rows // unit.rows * unit.rows  # rows of a pass, in whole units
    if stage.micro_batch is not None or not most:
        return _split(stage, most_rows, unit)
    batch = int(stage.batch)
    passes = -(-batch // most)
    return SplitStage(stage.threshold, batch, -(-batch // (passes * unit.rows)) * unit.rows, passes)


def _packed(
    stage: StatedStage, most_rows: int, unit: MicrobatchUnit, rows_per_sample: int
) -> SplitStage:
    """Returns a stage whose samples share rows, in passes of the most rows."""
    batch = int(stage.batch)
    passes = -(-batch // (most_rows // rows_per_sample))
    return SplitStage(stage.threshold, batch, most_rows, passes, is_packed=True)


def held_rows(config: PlanConfig, unit: MicrobatchUnit, most: int, rows_per_sample: int = 1) -> int:
    """Returns the rows that a pass of `max_tokens_per_pass` holds, in whole units, no more than
    `most`. With `reproducible_sums` a device has all rows of a sample.

    Raises:
      Refusal: it does not hold a unit, or a sample.
    """
    is_whole = config.optimizer.reproducible_sums
    whole = unit.rows * (rows_per_sample if is_whole else 1)
    rows = math.floor(pass_rows(config, unit.num_devices)) // whole * whole
    if rows < rows_per_sample:
        key, length = "max_tokens_per_pass", config.length.max_target_length
        least = -(-max(whole, rows_per_sample) // whole) * whole
        rule = f"x {unit.num_devices} devices must hold at least {least} rows ({unit})"
        if least > unit.rows:
            where = "on one device" if is_whole else "in one pass"
            rule = f"must hold the {rows_per_sample} rows of a {config.recipe.unit} {where}"
        raise Refusal(
            config, key, rule, {key: math.ceil(Fraction(least, unit.num_devices)) * length}
        )
    return min(rows, -(-most // whole) * whole)


def _unheld_ramp(config: PlanConfig, unit: MicrobatchUnit, unheld: Sequence[int]) -> Refusal:
    _, a, c = ramp_numbers(config)
    named = first_of(
        [f"stage {i} ({in_words((a + i * c) * unit.num_devices)})" for i in unheld], _MOST_NAMED
    )
    increment = stated(config, "per_device_batch_size_increment")
    micro = f"with {increment} every micro-batch ahead on {unit.num_devices} devices"
    rule = f"{micro} must be divisible by {unit.rows} ({unit}), but {named} cannot"
    return Refusal(
        config, "per_device_batch_size_start", rule, nearest_ramp(config, unit.rows_per_device)
    )


def _unheld_micro_batch(config: PlanConfig, unit: MicrobatchUnit) -> Refusal:
    if config.batch.per_device_batch_size is None:
        return _unheld_share(config, unit)
    p = exact(config.batch.per_device_batch_size)
    micro, shards = p * unit.num_devices, unit.batch_shards
    key, works = "per_device_batch_size", nearest_multiple(p, unit.rows_per_device, MOST_ROWS)
    product = f"x {unit.num_devices} devices = {in_words(micro)}"

    if micro.denominator != 1:
        return Refusal(config, key, f"{product} must be a whole number of samples", {key: works})
    if micro % shards:
        rule = f"{product} must be divisible by the {shards} batch shards"
        return Refusal(config, key, rule, {key: works}, _padded_batch(config, int(micro), unit))

    # The devices divide the micro-batch, its pipeline microbatches do not.
    pipeline_parts = nearest_divisor(
        int(micro) // shards, unit.num_pipeline_microbatches, unit.num_pipeline_stages
    )
    rule = f"the micro-batch of {micro} must be divisible by {unit}"
    if pipeline_parts:
        key = "num_pipeline_microbatches"
        return Refusal(config, key, rule, {key: Fraction(pipeline_parts)})
    padded = _padded_batch(config, int(micro), unit)
    return Refusal(config, key, rule, padded or {"num_pipeline_microbatches": -1})


def _padded_batch(config: PlanConfig, micro: int, unit: MicrobatchUnit) -> dict[str, Value]:
    """Returns settings that keep a batch whose passes of `micro` rows are too few for the pipeline:
    padded passes. There are none for a batch of more than MOST_SAMPLES.
    """
    passes = config.batch.gradient_accumulation_steps
    if micro * (passes or 1) > MOST_SAMPLES:
        return {}
    batch: dict[str, Value] = {"global_batch_size": micro * (passes or 1), "batch_padding": True}
    if passes is not None:
        batch["gradient_accumulation_steps"] = None
    if micro < unit.rows:
        # a pass must hold a row of every part
        batch["per_device_batch_size"] = unit.rows_per_device
    return batch


def _unheld_share(config: PlanConfig, unit: MicrobatchUnit) -> Refusal:
    """Returns the refusal of a global batch whose rows per pass the devices cannot hold."""
    key, g = "global_batch_size", config.batch.gradient_accumulation_steps or 1
    rule = f"must be {g} accumulation steps x a multiple of {unit.rows} ({unit})"
    batch = constant_batch(config)
    assert batch is not None, "p follows from it"
    works: dict[str, Value] = {key: nearest_multiple(batch, unit.rows * g, MOST_SAMPLES)}
    if unit.rows * g > MOST_SAMPLES:
        works = {
            "gradient_accumulation_steps": 1,
            key: nearest_multiple(batch, unit.rows, MOST_SAMPLES),
        }
    return Refusal(
        config, key, rule, works if unit.rows <= MOST_SAMPLES else {"num_pipeline_microbatches": -1}
    )


def _unheld_batches(
    config: PlanConfig, unit: MicrobatchUnit, batches: Batches, unheld: Sequence[int], current: int
) -> Refusal:
    """Returns the refusal of stated global batches: a pass cannot hold a unit, or a batch is not a
    multiple of it.
    """
    most_rows = math.floor(pass_rows(config, unit.num_devices))
    rows_key, parts_key = "per_device_batch_size", "num_pipeline_microbatches"
    pipeline, shards = unit.num_pipeline_stages, unit.batch_shards

    # Other pipeline microbatches, if some hold every batch: they keep the stated batches.
    common = math.gcd(*(batch for _, batch in batches[current:]))
    if (
        config[parts_key] != -1
        and common % (shards * pipeline) == 0
        and shards * pipeline <= most_rows
    ):
        one_pass = f"one pass ({stated(config, rows_key)} x {unit.num_devices} devices)"
        rule = (
            f"{unit} = {unit.rows} samples must fit into {one_pass} and divide every global batch "
            "ahead"
        )
        units, most = common // shards // pipeline, most_rows // shards // pipeline
        nearest = nearest_divisor(units, unit.num_pipeline_microbatches // pipeline) or 1
        works = pipeline * (nearest if nearest <= most else largest_divisor(units, most))
        return Refusal(config, parts_key, rule, {parts_key: works})

    # More rows per device, if a pass is smaller than a unit.
    if most_rows < unit.rows:
        rule = (
            f"x {unit.num_devices} devices must hold at least {unit.rows} samples in one pass "
            f"({unit})"
        )
        return Refusal(config, rows_key, rule, {rows_key: unit.rows_per_device})

    # Else the nearest batches that are multiples of the unit. Stages behind the run stay as stated.
    divisible = f"must be divisible by {unit.rows} ({unit})"
    rule = f"{divisible} unless batch_padding=true"
    nearest_batches = [
        (t, int(nearest_multiple(batch, unit.rows, MOST_SAMPLES))) for t, batch in batches[current:]
    ]
    fitting = [*batches[:current], *nearest_batches]
    key = "global_batch_size"
    batch: Value = fitting[0][1]
    if isinstance(config.batch.global_batch_size, str):
        batch = tokens_text(fitting[0][1], config.slots_per_sample)
    if config.batch.batch_size_schedule is not None:
        named = first_of([f"stage {i} of {batches[i][1]}" for i in unheld], _MOST_NAMED)
        rule = (
            f"every stage ahead {divisible}, but {named} cannot, unless batch_padding=true keeps "
            "every batch"
        )
        key, batch = "batch_size_schedule", stated_schedule(fitting, config.slots_per_sample)
        if seesaw := Seesaw.if_stated(config):
            batch = f"seesaw {fitting[0][1]} {seesaw.factor}"

    remedy: dict[str, Value] = {key: batch}
    if unit.rows > MOST_SAMPLES:
        remedy = {parts_key: -1}
    elif len(str(batch)) > MOST_TYPED:
        remedy = {"batch_padding": True}
    return Refusal(config, key, rule, remedy)
