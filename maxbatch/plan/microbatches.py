"""How the devices hold a stage: its micro-batch, its accumulation steps, and what to say where they cannot.

N devices, p rows per device, M micro-batch, B global batch = M x accumulation steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number
from maxbatch.plan.mesh_shape import MeshShape, pipeline_microbatches
from maxbatch.plan.stages import (
    StatedStage,
    increments,
    nearest_multiple,
    ramp_numbers,
    ramp_text,
    stated_batches,
)
from maxbatch.system.errors import ConfigError

_MOST_NAMED = 12


@dataclasses.dataclass(frozen=True)
class Cut:
    """A stage as it runs: batch = micro_batch x accumulation_steps, in samples.

    micro_batch and accumulation_steps are 0 where the devices cannot hold the stage; batch is 0 as well where
    it is not even whole.
    """

    threshold: Fraction
    batch: int
    micro_batch: int
    accumulation_steps: int


@dataclasses.dataclass(frozen=True)
class MicrobatchUnit:
    """What every micro-batch must be divisible by: the batch shards times the pipeline's microbatches."""

    batch_shards: int
    num_pipeline_microbatches: int
    num_pipeline_stages: int

    @classmethod
    def from_config(cls, config: ConfigDict, num_devices: int, mesh: MeshShape) -> MicrobatchUnit:
        """Resolve `num_pipeline_microbatches` (-1: the stages), or raise ConfigError."""
        stages = mesh.num_pipeline_stages
        parts = pipeline_microbatches(config, stages)
        if parts < 1 or parts % stages:
            rows = math.floor(exact(config.per_device_batch_size) * num_devices) // mesh.batch_shards
            works = min(_divisors(rows, stages), key=lambda m: abs(m - parts), default=-1)
            raise ConfigError(
                f"num_pipeline_microbatches={parts}: must be a multiple of the {stages} pipeline stages; "
                f"works: num_pipeline_microbatches={works}"
            )
        return cls(mesh.batch_shards, parts, stages)

    @property
    def rows(self) -> int:
        """The fewest samples that a micro-batch can have, and its unit."""
        return self.batch_shards * self.num_pipeline_microbatches

    def __str__(self) -> str:
        if self.num_pipeline_microbatches == 1:
            return f"the {self.batch_shards} batch shards"
        return f"{self.batch_shards} batch shards x {self.num_pipeline_microbatches} pipeline microbatches"


def cut(target: StatedStage, most_rows: int, divisor: MicrobatchUnit) -> Cut:
    """Return how a stage runs: as stated, or in the largest micro-batch up to `most_rows` that divides it."""
    micro = target.micro_batch
    if micro is None and target.batch % divisor.rows == 0:
        units = _largest_divisor(int(target.batch) // divisor.rows, most_rows // divisor.rows)
        micro = Fraction(units * divisor.rows)
    batch = int(target.batch) if target.batch.denominator == 1 else 0
    if not micro or micro % divisor.rows:
        return Cut(target.threshold, batch, 0, 0)
    return Cut(target.threshold, batch, int(micro), int(target.batch / micro))


def check_held(
    config: ConfigDict, num_devices: int, divisor: MicrobatchUnit, cuts: Sequence[Cut], ahead: int
) -> None:
    """Raise one ConfigError for all stages from `ahead` on that the devices cannot hold evenly."""
    unheld = [i for i in range(ahead, len(cuts)) if not cuts[i].micro_batch]
    if not unheld:
        return
    if config.enable_rampup_batch_size:
        raise _ramp_fault(config, num_devices, divisor, unheld)
    batches = stated_batches(config)
    if batches is None or config.gradient_accumulation_steps is not None:
        raise _micro_batch_fault(config, num_devices, divisor)
    raise _stated_batch_fault(config, num_devices, divisor, batches, ahead, unheld)


def _stated_batch_fault(
    config: ConfigDict,
    num_devices: int,
    divisor: MicrobatchUnit,
    batches: Sequence[tuple[Fraction, int]],
    ahead: int,
    unheld: Sequence[int],
) -> ConfigError:
    sizes = [batch for _, batch in batches[ahead:]]
    parts = _fitting_parts(config, num_devices, divisor, sizes)
    if parts is not None:
        return ConfigError(
            f"num_pipeline_microbatches={config.num_pipeline_microbatches}: {divisor} = {divisor.rows} samples must "
            f"fit into one pass (per_device_batch_size={config.per_device_batch_size} x {num_devices} devices) and "
            f"divide every global batch ahead; works: num_pipeline_microbatches={parts}"
        )
    rule = f"must be divisible by {divisor.rows} ({divisor})"
    if config.batch_size_schedule is None:
        stated = f"global_batch_size={config.global_batch_size}: {rule}"
        works = f"global_batch_size={nearest_multiple(config.global_batch_size, divisor.rows)}"
    else:
        named = _named([f"stage {i} of {batches[i][1]}" for i in unheld])
        stated = (
            f"batch_size_schedule={config.batch_size_schedule}: every stage ahead {rule}, but {named} cannot"
        )
        fitting = [f"{_samples(t, config)}:{nearest_multiple(batch, divisor.rows)}" for t, batch in batches]
        works = f'batch_size_schedule="{" ".join(fitting)}"'
    if exact(config.per_device_batch_size) * num_devices < divisor.rows:
        p = f"per_device_batch_size={plain_number(Fraction(divisor.rows, num_devices))}"
        stated = (
            f"per_device_batch_size={config.per_device_batch_size}: x {num_devices} devices must hold at least "
            f"{divisor.rows} samples in one pass ({divisor})"
        )
        works = f"{p} {works}" if any(size % divisor.rows for size in sizes) else p
    return ConfigError(f"{stated}; works: {works}")


def _fitting_parts(
    config: ConfigDict, num_devices: int, divisor: MicrobatchUnit, sizes: Sequence[int]
) -> int | None:
    """Return the pipeline microbatches nearest to the stated ones with which the devices hold batches of these sizes;
    None where none are stated, or none would do."""
    stated, shards = config.num_pipeline_microbatches, divisor.batch_shards
    common = math.gcd(*sizes)
    if stated == -1 or common % shards:
        return None
    most = exact(config.per_device_batch_size) * num_devices / shards
    fitting = [m for m in _divisors(common // shards, divisor.num_pipeline_stages) if m <= most]
    return min(fitting, key=lambda m: abs(m - stated), default=None)


def _micro_batch_fault(config: ConfigDict, num_devices: int, divisor: MicrobatchUnit) -> ConfigError:
    p = exact(config.per_device_batch_size)
    micro = p * num_devices
    key, value = "per_device_batch_size", config.per_device_batch_size
    works = nearest_multiple(p, Fraction(divisor.rows, num_devices))
    if micro.denominator != 1:
        rule = f"x {num_devices} devices = {plain_number(micro)} must be a whole number of samples"
    elif micro % divisor.batch_shards:
        rule = (
            f"x {num_devices} devices = {micro} must be divisible by the {divisor.batch_shards} batch shards"
        )
    else:
        parts = divisor.num_pipeline_microbatches
        fitting = _divisors(int(micro) // divisor.batch_shards, divisor.num_pipeline_stages)
        if fitting:
            key, value = "num_pipeline_microbatches", config.num_pipeline_microbatches
            works = Fraction(min(fitting, key=lambda m: abs(m - parts)))
        rule = f"the micro-batch of {micro} must be divisible by {divisor}"
    return ConfigError(f"{key}={value}: {rule}; works: {key}={plain_number(works)}")


def _ramp_fault(
    config: ConfigDict, num_devices: int, divisor: MicrobatchUnit, unheld: Sequence[int]
) -> ConfigError:
    _, a, c = ramp_numbers(config)
    unit = Fraction(divisor.rows, num_devices)
    n, step, start = increments(config), nearest_multiple(abs(c), unit), nearest_multiple(a, unit)
    if c < 0:
        start, step = max(start, n * step + unit), -step
    named = _named([f"stage {i} ({plain_number((a + i * c) * num_devices)})" for i in unheld])
    return ConfigError(
        f"per_device_batch_size_start={config.per_device_batch_size_start}, per_device_batch_size_increment="
        f"{config.per_device_batch_size_increment}: every micro-batch ahead on {num_devices} devices must be "
        f"divisible by {divisor.rows} ({divisor}), but {named} cannot; works: {ramp_text(start, step, n)}"
    )


def _samples(threshold: Fraction, config: ConfigDict) -> str:
    """Return a schedule's threshold as text: samples, or tokens where the samples are not whole."""
    tokens = threshold * config.max_target_length
    return str(threshold) if threshold.denominator == 1 else f"{plain_number(tokens)}t"


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _divisors(number: int, of: int) -> list[int]:
    """Return the divisors of number that are multiples of `of`."""
    if number < 1 or number % of:
        return []
    number //= of
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({of * d for i in low for d in (i, number // i)})


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of number that is at most `most`; 0 where there is none."""
    if most >= number:
        return number
    root = math.isqrt(number)
    if most > root:
        for quotient in range(-(-number // most), root + 1):
            if number % quotient == 0:
                return number // quotient
    return next((d for d in range(min(most, root), 0, -1) if number % d == 0), 0)
