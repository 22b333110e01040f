"""The stages and the length of a run as stated: a stage is a threshold and the samples per update
from it on.

A constant batch is one stage, a ramp is n + 1 of them, a schedule as many as it lists. All numbers
are exact. N devices, p rows per device, g accumulation steps, M micro-batch, B global batch = M x
g.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.values import Value, counted, exact, shown
from maxbatch.plan.divisors import divisors
from maxbatch.plan.holes import Holes
from maxbatch.plan.refusal import MOST_TYPED, Refusal, in_words, stated
from maxbatch.plan.seesaw import Seesaw
from maxbatch.plan.skip_samples import holes_of

MOST_STAGES = 10_000
MOST_ROWS = 2**31  # per device
MOST_SAMPLES = 2**40  # per update; far beyond any machine
_LARGEST = 2**63 - 1  # of all numbers

Batches = Sequence[tuple[Fraction, int]]  # pairs of threshold in samples and global batch


class StatedStage(NamedTuple):
    """One stage as stated: from `threshold` samples on, `batch` samples per update."""

    threshold: Fraction
    batch: Fraction
    # rows per micro-batch: per_device_batch_size x devices; None if derived from the batch
    micro_batch: Fraction | None


def stated_stages(config: PlanConfig, num_devices: int) -> list[StatedStage]:
    """Returns the stages that the config states.

    Raises:
      ConfigError: a ramp or a schedule breaks its rule, or two statements disagree.
    """
    g = config.batch.gradient_accumulation_steps
    if config.ramp.enable_rampup_batch_size:
        n, (_, a, c) = increments(config), ramp_numbers(config)
        samples_apart = Fraction(config.ramp.global_rampup_samples) / n
        micro = [(a + i * c) * num_devices for i in range(n + 1)]
        return [StatedStage(i * samples_apart, m * (g or 1), m) for i, m in enumerate(micro)]

    micro_batch = pass_rows(config, num_devices)
    batches = stated_batches(config)
    if batches is None:
        return [StatedStage(Fraction(0), micro_batch * (g or 1), micro_batch)]
    if g is not None and any(batch != micro_batch * g for _, batch in batches):
        key = (
            "global_batch_size"
            if config.batch.batch_size_schedule is None
            else "batch_size_schedule"
        )
        product = (
            f"per_device_batch_size x {num_devices} devices x {g} = {in_words(micro_batch * g)}"
        )
        rule = f"{product} must agree with {stated(config, key)}, stated beside it"
        raise Refusal(
            config, "gradient_accumulation_steps", rule, {"gradient_accumulation_steps": None}
        )
    micro_or_none = None if g is None else micro_batch
    return [StatedStage(threshold, Fraction(batch), micro_or_none) for threshold, batch in batches]


def pass_rows(config: PlanConfig, num_devices: int) -> Fraction:
    """Returns p x N, the rows of one pass; without p they follow from the tokens of a pass, or from
    the global batch and its accumulation steps.
    """
    if (budget := config.batch.max_tokens_per_pass) is not None:
        return Fraction(budget // config.length.max_target_length * num_devices)
    if config.batch.per_device_batch_size is None:
        batch, g = constant_batch(config), config.batch.gradient_accumulation_steps
        if batch is None or g is None:
            rule = (
                "must be stated, or follow from global_batch_size and gradient_accumulation_steps"
            )
            raise Refusal(config, "per_device_batch_size", rule, {"per_device_batch_size": 1})
        return Fraction(batch, g)
    return exact(config.batch.per_device_batch_size) * num_devices


def increments(config: PlanConfig) -> int:
    """Returns n = (p - a) / c, the increments of the ramp; raises ConfigError unless it is a whole
    number >= 1.
    """
    p, a, c = ramp_numbers(config)
    rule = "must not be 0"
    if c:
        n = (p - a) / c
        if n.denominator == 1 and 1 <= n <= MOST_STAGES:
            return int(n)
        start, target = (
            stated(config, "per_device_batch_size_start"),
            stated(config, "per_device_batch_size"),
        )
        rule = (
            f"increments from {start} to {target} must be a whole number from 1 to {MOST_STAGES}, "
            f"not {in_words(n)}"
        )
    raise Refusal(config, "per_device_batch_size_increment", rule, nearest_ramp(config))


def constant_batch(config: PlanConfig) -> int | None:
    """Returns the samples of `global_batch_size`, which may state them in tokens; None: it is not
    stated.

    Raises:
      ConfigError: the tokens are not whole samples, or too many.
    """
    batch, slots = config.batch.global_batch_size, config.slots_per_sample
    if not isinstance(batch, str):
        return batch
    samples = counted(batch, slots)
    assert samples is not None, "the config has read it"
    nearest = nearest_multiple(samples, 1, MOST_SAMPLES)
    if samples != nearest:
        works = {"global_batch_size": tokens_text(nearest, slots)}
        raise Refusal(config, "global_batch_size", _whole_samples(slots), works)
    return int(samples)


def tokens_text(samples: Fraction | int, slots: int) -> str:
    """Returns a batch in tokens as a config states it."""
    return f"{int(samples * slots)}t"


def stated_batches(config: PlanConfig) -> Batches | None:
    """Returns the batches that `global_batch_size` or `batch_size_schedule` states; None: neither
    is stated.
    """
    constant, schedule = constant_batch(config), config.batch.batch_size_schedule
    if schedule is None:
        return None if constant is None else [(Fraction(0), constant)]
    if seesaw := Seesaw.if_stated(config):
        total = data_end(config, None)
        if total is None:
            rule = "needs a length in samples or tokens, which its stages divide"
            steps = config.length.steps
            samples = (
                100_000 if steps is None else seesaw.samples_for(config.rates, steps, MOST_SAMPLES)
            )
            works: dict[str, Value] = {"train_samples": samples}
            works |= {
                name: None for name in ("steps", "num_epochs") if config.length[name] is not None
            }
            raise Refusal(config, "batch_size_schedule", rule, works)
        return seesaw.batches(config.rates, total, MOST_SAMPLES)
    batches = parse_schedule(schedule, config.slots_per_sample)
    if constant is not None and any(batch != constant for _, batch in batches):
        rule = f"must agree with {stated(config, 'batch_size_schedule')}, stated beside it"
        raise Refusal(config, "global_batch_size", rule, {"global_batch_size": None})
    return batches


def parse_schedule(text: str, length: int) -> Batches:
    """Reads "0:256 100000:512 250Bt:4Mit": pairs of threshold and batch, separated by blanks or
    commas.

    Each of them counts samples, or tokens (`length` per sample) with the suffix t.

    Raises:
      ConfigError: a pair cannot be read, a batch in tokens is not whole samples, the first
        threshold is not 0, or thresholds do not rise.
    """

    def refusal(rule: str, works: str) -> Refusal:
        key = "batch_size_schedule"
        return Refusal({key: text}, key, rule, {key: works} if len(works) <= MOST_TYPED else {})

    words = text.replace(",", " ").split()
    if not 1 <= len(words) <= MOST_STAGES:
        raise refusal(f"must be 1 to {MOST_STAGES} pairs SAMPLES:BATCH", "0:256 100K:512")
    batches: list[tuple[Fraction, int]] = []
    for word in words:
        left, _, right = word.partition(":")
        threshold, batch = counted(left, length), counted(right, length)
        if batch and right.endswith("t") and batch.denominator != 1:
            nearest = tokens_text(nearest_multiple(batch, 1, MOST_SAMPLES), length)
            works = " ".join(_in_whole_samples(words, length))
            example = f", such as {nearest}" if len(works) > MOST_TYPED else ""
            raise refusal(f"{shown(right)}: {_whole_samples(length)}{example}", works)
        if (
            threshold is None
            or batch is None
            or batch.denominator != 1
            or not 1 <= batch <= MOST_SAMPLES
        ):
            raise refusal(f"{shown(word)} must be SAMPLES:BATCH", "0:256 100K:512 2Bt:1024")
        batches.append((threshold, int(batch)))

    # The schedule that a refusal names: thresholds in rising order, from 0 on.
    (_, first), *others = sorted(dict(batches).items())
    rising = stated_schedule([(Fraction(0), first), *others], length)
    if batches[0][0] != 0:
        raise refusal("must start at 0 samples", rising)
    for word, (before, _), (threshold, _) in zip(words[1:], batches, batches[1:], strict=False):
        if threshold <= before:
            raise refusal(f"thresholds must rise, {shown(word)} does not", rising)
    return batches


def stated_schedule(batches: Batches, length: int) -> str:
    """Returns a schedule as text, in whole samples or tokens; stages of the same batch that follow
    each other are one.

    The text is whole, whatever its length: a schedule without its last stages is another run.
    """
    # By the threshold in whole tokens: of two stages that begin at one token the last one counts.
    pairs: dict[Fraction, tuple[str, int]] = {}
    for threshold, batch in batches:
        tokens = math.ceil(threshold * length)
        start = f"{threshold}" if threshold.denominator == 1 else f"{tokens}t"
        pairs[Fraction(tokens, length)] = start, batch
    stages = [
        next(group) for _, group in itertools.groupby(pairs.values(), key=operator.itemgetter(1))
    ]
    return " ".join(f"{start}:{batch}" for start, batch in stages)


def nearest_multiple(value: int | Fraction, unit: int | Fraction, most: int = _LARGEST) -> Fraction:
    """Returns the multiple of unit nearest to value, from one unit to the last that is not above
    `most`.
    """
    return max(1, min(round(Fraction(value) / unit), math.floor(most / Fraction(unit)))) * Fraction(
        unit
    )


def ramp_numbers(config: PlanConfig) -> tuple[Fraction, Fraction, Fraction]:
    """Returns p, a and c of a ramp, exactly."""
    target = config.batch.per_device_batch_size
    assert target is not None, "the rules of the config give every ramp its target"
    return (
        exact(target),
        exact(config.ramp.per_device_batch_size_start),
        exact(config.ramp.per_device_batch_size_increment),
    )


def nearest_ramp(config: PlanConfig, unit: Fraction = Fraction(1)) -> dict[str, Value]:
    """Returns the keys of a ramp near the stated one: whole increments, rows per device in
    multiples of unit.

    Its last batch is the multiple nearest to the stated one, unless no ramp of the same direction
    ends there.
    """
    p, a, c = ramp_numbers(config)
    start, target = (nearest_multiple(rows, unit, MOST_ROWS) for rows in (a, p))
    if start == target:
        # Rounded, the two are one: move the start away by the increment or by a unit, in the stated
        # direction; beyond the bounds move the target instead.
        step = nearest_multiple(abs(c), unit, MOST_ROWS)
        starts = [target + step, target + unit] if p < a else [target - step, target - unit]
        allowed = [rows for rows in starts if unit <= rows <= MOST_ROWS]
        if allowed:
            start = allowed[0]
        else:
            target = start + step if start + step <= MOST_ROWS else start - unit

    # The increment divides the way from start to target; take the divisor nearest to the stated one.
    units, wanted = abs(target - start) / unit, abs(c) / unit
    fitting = [d for d in divisors(int(units)) if units / d <= MOST_STAGES]
    step = unit * min(fitting, key=lambda d: abs(d - wanted))
    return {
        "per_device_batch_size_start": start,
        "per_device_batch_size_increment": step if target > start else -step,
        "per_device_batch_size": target,
    }


def data_end(
    config: PlanConfig, samples_per_epoch: int | None, holes: Holes | None = None
) -> int | None:
    """Returns the samples after which a length in data ends the run; None: there is none, or it is
    unknown.

    Args:
      holes: those of the config, if they are read already.
    """
    ends: dict[str, int] = {}
    if config.length.train_samples is not None:
        ends["train_samples"] = config.length.train_samples
    if config.length.train_tokens is not None:
        ends["train_tokens"] = -(-config.length.train_tokens // config.slots_per_sample)
    if config.length.num_epochs is not None and samples_per_epoch is not None:
        end = math.ceil(exact(config.length.num_epochs) * samples_per_epoch)
        holes = holes_of(config) if holes is None else holes
        ends["num_epochs"] = holes.kept_before(end)
        if not ends["num_epochs"]:
            rule = f"leaves out all {end} samples of {stated(config, 'num_epochs')}"
            raise Refusal(config, "skip_samples", rule, {"skip_samples": ""})
    if not ends:
        return None

    (first, end), *others = ends.items()
    for name, other in others:
        if other != end:
            rule = (
                f"{end} samples must agree with {stated(config, name)}, {other} samples, stated "
                "beside it"
            )
            raise Refusal(config, first, rule, {name: None})
    return end


def check_epochs(config: PlanConfig, samples_per_epoch: int | None) -> None:
    """Refuses `num_epochs` beside another length where the samples of an epoch will not be known,
    to compare the two.

    For a plan that stands for the run, or a run whose data is open; a plan before that leaves the
    comparison to it.
    """
    others = [
        name
        for name in ("steps", "train_samples", "train_tokens")
        if config.length[name] is not None
    ]
    if others and config.length.num_epochs is not None and samples_per_epoch is None:
        rule = (
            f"must not be stated beside {stated(config, 'num_epochs')} if the samples of an epoch "
            "are unknown"
        )
        raise Refusal(config, others[0], rule, {"num_epochs": None})


def _in_whole_samples(words: Sequence[str], slots: int) -> Iterator[str]:
    """Yields the pairs of a schedule with batches in tokens rounded to whole samples."""
    for word in words:
        left, _, right = word.partition(":")
        batch = counted(right, slots) if right.endswith("t") else None
        yield (
            word
            if batch is None
            else f"{left}:{tokens_text(nearest_multiple(batch, 1, MOST_SAMPLES), slots)}"
        )


def _whole_samples(slots: int) -> str:
    return f"tokens of a batch must be whole samples of {slots} tokens"
