"""What a config states about the batch, as stages: from a threshold on, so many samples per update.

A constant batch is one stage, a ramp is n + 1 of them, a schedule as many as it lists. All numbers are exact.
N devices, p rows per device, g accumulation steps, M micro-batch, B global batch = M x g.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number, shown
from maxbatch.system.errors import ConfigError

MOST_STAGES = 10_000
MOST_SAMPLES = 2**40  # per update; far beyond any machine, and small enough to be factored at once
ANYWHERE = Fraction(1)  # rows per device that devices of any number and mesh hold, a pipeline's parts aside
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclasses.dataclass(frozen=True)
class StatedStage:
    """One stage as it is stated: from `threshold` samples on, `batch` samples per update.

    `micro_batch` is p x N where the accumulation steps are stated; None where they follow from the batch.
    """

    threshold: Fraction
    batch: Fraction
    micro_batch: Fraction | None


def stated_stages(config: ConfigDict, num_devices: int, unit: Fraction = ANYWHERE) -> list[StatedStage]:
    """Return the stages that the config states.

    Args:
      config: the run's config.
      num_devices: N.
      unit: what p must be a multiple of on these devices, as the ramp is that is named in place of one that breaks
        its rule.

    Raises:
      ConfigError: a ramp or a schedule that breaks its rule, or two statements that disagree.
    """
    p, g = exact(config.per_device_batch_size), config.gradient_accumulation_steps
    if config.enable_rampup_batch_size:
        n = increments(config, unit)
        _, a, c = ramp_numbers(config)
        apart = Fraction(config.global_rampup_samples) / n
        micro = [(a + i * c) * num_devices for i in range(n + 1)]
        return [StatedStage(i * apart, m * (g or 1), m) for i, m in enumerate(micro)]
    micro_batch = p * num_devices
    batches = stated_batches(config)
    if batches is None:
        return [StatedStage(Fraction(0), micro_batch * (g or 1), micro_batch)]
    if g is None:
        return [StatedStage(threshold, Fraction(batch), None) for threshold, batch in batches]
    whole = micro_batch * g
    if any(batch != whole for _, batch in batches):
        key = "global_batch_size" if config.batch_size_schedule is None else "batch_size_schedule"
        raise ConfigError(
            f"gradient_accumulation_steps={g}: per_device_batch_size x {num_devices} devices x {g} = "
            f"{plain_number(whole)} must agree with {key}={shown(str(config[key]))}, stated beside it; "
            "works: gradient_accumulation_steps=null"
        )
    return [StatedStage(threshold, Fraction(batch), micro_batch) for threshold, batch in batches]


def increments(config: ConfigDict, unit: Fraction = ANYWHERE) -> int:
    """Return n = (p - a) / c, the increments of the ramp; ConfigError where that is no whole number >= 1 (`unit`: see
    `stated_stages`)."""
    p, a, c = ramp_numbers(config)
    key = "per_device_batch_size_increment"
    if c == 0:
        raise ConfigError(f"{key}=0: must not be 0; works: {_nearest_ramp(p, a, c, unit)}")
    n = (p - a) / c
    if n.denominator == 1 and 1 <= n <= MOST_STAGES:
        return int(n)
    raise ConfigError(
        f"{key}={plain_number(c)}: increments from per_device_batch_size_start={plain_number(a)} to "
        f"per_device_batch_size={plain_number(p)} must be a whole number from 1 to {MOST_STAGES}, not "
        f"{shown(str(plain_number(n)))}; works: {_nearest_ramp(p, a, c, unit)}"
    )


def stated_batches(config: ConfigDict) -> list[tuple[Fraction, int]] | None:
    """Return (threshold in samples, global batch) where `global_batch_size` or a schedule states them."""
    constant, schedule = config.global_batch_size, config.batch_size_schedule
    if schedule is None:
        return None if constant is None else [(Fraction(0), constant)]
    batches = parse_schedule(schedule, config.max_target_length)
    if constant is not None and any(batch != constant for _, batch in batches):
        raise ConfigError(
            f"global_batch_size={constant}: must agree with batch_size_schedule={shown(schedule)}, stated "
            "beside it; works: global_batch_size=null"
        )
    return batches


def parse_schedule(text: str, length: int) -> list[tuple[Fraction, int]]:
    """Read "0:256 100000:512 250Bt:1536" as (threshold in samples, global batch) pairs.

    Args:
      text: pairs separated by blanks or commas. A threshold counts samples, or tokens with the suffix t; the
        suffixes K, M and B scale it.
      length: tokens per sample.

    Raises:
      ConfigError: a pair that cannot be read, a first threshold that is not 0, thresholds that do not rise.
    """
    words = text.replace(",", " ").split()
    batches: list[tuple[Fraction, int]] = []
    for word in words:
        left, _, right = word.partition(":")
        threshold, batch = _amount(left, length), _amount(right, None)
        if threshold is None or batch is None or batch.denominator != 1 or not 1 <= batch <= MOST_SAMPLES:
            raise _schedule_fault(text, f"{shown(word)} must be SAMPLES:BATCH", "0:256 100K:512 2Bt:1024")
        if not batches and threshold != 0:
            raise _schedule_fault(text, "must start at 0 samples", " ".join([f"0:{batch}", *words[1:]]))
        if batches and threshold <= batches[-1][0]:
            rule = f"thresholds must rise, {shown(word)} does not"
            raise _schedule_fault(text, rule, " ".join(words[: len(batches)]))
        batches.append((threshold, int(batch)))
    if not batches or len(batches) > MOST_STAGES:
        raise _schedule_fault(text, f"must be 1 to {MOST_STAGES} pairs SAMPLES:BATCH", "0:256 100K:512")
    return batches


def nearest_multiple(value: int | Fraction, unit: int | Fraction) -> Fraction:
    """Return the multiple of unit, at least one unit, that lies nearest to value."""
    return max(1, round(Fraction(value) / unit)) * Fraction(unit)


def ramp_numbers(config: ConfigDict) -> tuple[Fraction, Fraction, Fraction]:
    """Return p, a and c of a ramp, exactly."""
    p, a = exact(config.per_device_batch_size), exact(config.per_device_batch_size_start)
    return p, a, exact(config.per_device_batch_size_increment)


def ramp_text(start: Fraction, step: Fraction, n: int) -> str:
    """Return the overrides that state a ramp of n increments."""
    return (
        f"per_device_batch_size_start={plain_number(start)} "
        f"per_device_batch_size_increment={plain_number(step)} "
        f"per_device_batch_size={plain_number(start + n * step)}"
    )


def _nearest_ramp(p: Fraction, a: Fraction, c: Fraction, unit: Fraction) -> str:
    """Return the overrides of a ramp near this one, of whole increments and multiples of a unit."""
    start = nearest_multiple(a, unit)
    way = -1 if p < start else 1
    far = abs(p - start) or start
    step = nearest_multiple(abs(c) or far, unit)
    n = max(1, round(far / step)) if p != start else 1
    if n > MOST_STAGES:
        n, step = 1, nearest_multiple(far, unit)
    if way < 0 and n * step >= start:
        n = math.ceil(start / step) - 1
    return ramp_text(start, way * step, n) if n else ramp_text(start, step, 1)


def _amount(text: str, length: int | None) -> Fraction | None:
    """Return a count of samples, or of tokens (suffix t) where a length is given; None: not a count."""
    per_sample = 1
    if length is not None and text.endswith("t"):
        text, per_sample = text[:-1], length
    unit = text[-1:].upper() if text[-1:].upper() in _UNITS else ""
    digits = text[: len(text) - len(unit)].replace("_", "")
    if not (digits.isascii() and digits.replace(".", "", 1).isdecimal()) or len(digits) > 30:
        return None
    return Fraction(digits) * _UNITS[unit] / per_sample


def _schedule_fault(text: str, rule: str, works: str) -> ConfigError:
    return ConfigError(f'batch_size_schedule={shown(text)}: {rule}; works: batch_size_schedule="{works}"')
