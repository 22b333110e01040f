"""Conversions of other frameworks' values, beyond the table of words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from maxbatch.around.words.skipped import SKIPPING, Batches, skipped
from maxbatch.config.recipes import slots_per_sample
from maxbatch.config.values import (
    Value,
    counted,
    exact,
    field_names,
    of_duration,
    plain_number,
    schedule_text,
)

OF_LOSS = ("reduction", "loss_reduction")  # words for a loss's reduction
# Words for the fields of a record, and ours.
FIELD_OF: Mapping[str, str] = {
    "field_instruction": "instruction", "field_input": "input", "field_output": "output", "field_messages": "messages",
    "columns.prompt": "instruction", "columns.query": "input", "columns.response": "output",
    "columns.messages": "messages", "columns.chosen": "chosen", "columns.rejected": "rejected",
    "prompt_feature": "prompt", "completion_feature": "completion", "chat_feature": "messages",
    **{f"{block}{word}_key": field for block in ("", "data.") for word, field in (
        ("input", "prompt"), ("output", "completion"), ("chosen", "chosen"), ("rejected", "rejected"),
    )},
}  # fmt: skip
_OF_BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
_MODEL_AXES = tuple(
    f"{net}_{axis}_parallelism"
    for net in ("ici", "dcn")
    for axis in ("tensor", "context", "pipeline")
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The config and the machine for which a foreign word is converted."""

    # of all keys; empty: unknown
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    devices: int | None = None  # None: unknown
    hosts: int | None = None

    @property
    def is_of_prompts(self) -> bool:
        """Whether the config trains on prompts."""
        return self.values.get("batch_size") is not None

    @property
    def devices_of_replica(self) -> int | None:
        """Devices per model replica; None if it depends on the machine."""
        sizes = [self.values.get(axis) for axis in _MODEL_AXES]
        splitting = [size for size in sizes if isinstance(size, int) and size > 0]
        return math.prod(splitting) if len(splitting) == len(sizes) else None

    @property
    def slots_per_sample(self) -> int | None:
        """Tokens that a sample has room for; None where the config is unknown."""
        return slots_per_sample(self.values) if self.values else None

    def number(self, name: str) -> Fraction | None:
        """Returns the value of a numeric key, a batch in tokens as samples; None if it is null or
        unknown.
        """
        value = self.values.get(name)
        if name == "global_batch_size" and isinstance(value, str):
            return counted(value, slots_per_sample(self.values))
        return exact(value) if isinstance(value, int | float | Fraction) else None


def converted(word: str, text: str, setting: Setting) -> dict[str, str] | None:
    """Converts a word's value to our settings; returns None if facts are missing."""
    if word in OF_LOSS:
        rate = _rate_of_sum(setting) if text.strip().lower() == "sum" else None
        return None if rate is None else {"learning_rate": text_of(rate)}
    if word == "train_batch_size" and (schedule := _phases(text)):
        return {"batch_size_schedule": schedule}
    if word == "max_duration":
        return of_duration(text)
    if word in SKIPPING:
        return _skipped(word, text, setting)
    convert, value = _CONVERSIONS.get(word), read_number(text)
    settings = convert(value, setting) if convert and value else None
    return (
        None if settings is None else {name: text_of(number) for name, number in settings.items()}
    )


def _skipped(word: str, text: str, setting: Setting) -> dict[str, str] | None:
    """Converts skipped iterations to `skip_samples` and the length that is left, for one constant
    batch.
    """
    batch = setting.number("global_batch_size")
    if batch is None and setting.devices:
        p, g = (setting.number(f"{name}") for name in _OF_BATCH)
        batch = p * setting.devices * (g or 1) if p else None
    varies = any(
        setting.values.get(name) for name in ("enable_rampup_batch_size", "batch_size_schedule")
    )
    if batch is None or batch.denominator != 1 or varies or setting.is_of_prompts:
        return None
    left_out = skipped(word, text, Batches.constant(int(batch)))
    if left_out is None:
        return None
    lengths = {"steps": left_out.iterations, "train_samples": left_out.samples}
    settled = {name: length for name in lengths if (length := setting.number(name)) is not None}
    return {"skip_samples": left_out.samples.text} | {
        name: str(lengths[name].kept_before(int(length))) for name, length in settled.items()
    }


def record_fields(names: Mapping[str, str]) -> str | None:
    """Returns `record_fields` for their names by our fields, without equal names; None if it cannot
    hold a name.
    """
    others = {field: name.strip() for field, name in names.items() if name.strip() != field}
    text = (
        "{" + ", ".join(f"{field}: {name}" for field, name in others.items()) + "}"
        if others
        else ""
    )
    return text if (field_names(text) or {}) == others else None


def read_number(text: str) -> Fraction | None:
    """Parses a positive number; returns None for other text."""
    try:
        value = Fraction(text.strip().replace("_", ""))
    except (ValueError, ZeroDivisionError):
        return None
    return value if 0 < value < 2**63 else None


def text_of(number: Fraction) -> str:
    """Returns a number exactly, as text for an override."""
    return str(plain_number(number))


def _phases(text: str) -> str | None:
    """Returns `batch_size_schedule` for Levanter's list of phases, each a first update and its
    batch; None: no list.
    """
    try:
        phases = [(int(phase["start"]), int(phase["value"])) for phase in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    starts = [start for start, _ in phases]
    if (
        not phases
        or starts[0] != 0
        or starts != sorted(set(starts))
        or min(batch for _, batch in phases) < 1
    ):
        return None
    samples = [0]
    for (start, batch), (end, _) in itertools.pairwise(phases):
        samples.append(samples[-1] + (end - start) * batch)
    return schedule_text(zip(samples, (batch for _, batch in phases), strict=True))


def rampup_schedule(start: int, rise: int, samples: int, batch: int) -> str | None:
    """Returns `batch_size_schedule` for Megatron-LM's `--rampup-batch-size START RISE SAMPLES`, up
    to a global batch.

    None if whole steps do not reach the batch; Megatron-LM refuses that too.
    """
    if min(start, rise, samples) < 1 or batch <= start or (batch - start) % rise:
        return None
    n = (batch - start) // rise
    return schedule_text((Fraction(i * samples, n), start + i * rise) for i in range(n + 1))


_Found = dict[str, Fraction] | None
_Conversion = Callable[[Fraction, Setting], _Found]


def _chunk(factor: Callable[[Setting], int | None]) -> _Conversion:
    """Returns a conversion to pairs in one pass over all devices: the value times a factor."""

    def convert(value: Fraction, setting: Setting) -> _Found:
        by = factor(setting)
        return (
            {"micro_batch_size": value * by} if by is not None and setting.is_of_prompts else None
        )

    return convert


def _pairs(value: Fraction, setting: Setting) -> _Found:
    """Converts the pairs of a batch to its prompts."""
    group = setting.number("num_generations")
    whole = group is not None and (value / group).denominator == 1
    return {"batch_size": value / group} if group and whole and setting.is_of_prompts else None


def _warmup(value: Fraction, setting: Setting) -> _Found:
    steps = setting.number("steps")
    return {"warmup_steps_fraction": value / steps} if steps and 1 <= value <= steps else None


def _rate_of_sum(setting: Setting) -> Fraction | None:
    """Returns the rate for a mean loss that gives the same update as DDP's sum, whose gradient is
    larger by the tokens of a rank.

    Only SGD's steps grow with the gradient.
    """
    rate = setting.number("learning_rate")
    if rate is None or setting.values.get("opt_type") != "sgd":
        return rate
    replica, length = setting.devices_of_replica, setting.number("max_target_length")
    varies = any(
        setting.values.get(name) for name in ("enable_rampup_batch_size", "batch_size_schedule")
    )
    if varies or setting.is_of_prompts or not replica or not length:
        return None
    if setting.values.get("global_batch_size") is not None:
        batch, devices = setting.number("global_batch_size"), setting.devices
        rows = batch / Fraction(devices, replica) if batch and devices else None
    else:
        passes = setting.number("gradient_accumulation_steps") or 1
        p = setting.number("per_device_batch_size")
        rows = p * replica * passes if p else None
    return rate * rows * length if rows else None


def _last_rate(value: Fraction, setting: Setting) -> _Found:
    peak = setting.number("learning_rate")
    return {"learning_rate_final_fraction": value / peak} if peak and value <= peak else None


def _batches(value: Fraction, setting: Setting) -> _Found:
    passes, minibatches = setting.number("num_iterations"), setting.number("num_minibatches")
    updates = (
        passes * minibatches if setting.is_of_prompts and passes and minibatches else Fraction(1)
    )
    return {"steps": value * updates} if value.denominator == 1 else None


def _minibatches(value: Fraction, setting: Setting) -> _Found:
    """Converts prompts per update to updates per batch."""
    batch = setting.number("batch_size")
    return (
        {"num_minibatches": batch / value} if batch and (batch / value).denominator == 1 else None
    )


def _response(value: Fraction, setting: Setting) -> _Found:
    prompt = setting.number("max_prefill_predict_length")
    return {"max_target_length": value + prompt} if prompt and setting.is_of_prompts else None


def _eval_rows(value: Fraction, setting: Setting) -> _Found:
    return {"eval_per_device_batch_size": value / setting.devices} if setting.devices else None


_CONVERSIONS: Mapping[str, _Conversion] = {
    **dict.fromkeys(
        ("effective_batch_size", "effective_batch", "global_batch", "total_batch_size", "generation_batch_size"), _pairs
    ),
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size"), _minibatches),
    "ppo_micro_batch_size": _chunk(lambda setting: 1),
    **dict.fromkeys(
        ("ppo_micro_batch_size_per_gpu", "micro_train_batch_size"), _chunk(lambda setting: setting.devices)
    ),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup_iters", "lr_warmup_iters", "warmup_num_steps",
                     "lr_warmup_steps"), _warmup),
    **dict.fromkeys(("min_lr", "min_learning_rate", "lr_min"), _last_rate),
    **dict.fromkeys(("num_batches", "max_batches", "total_training_steps"), _batches),
    **dict.fromkeys(("max_response_length", "max_completion_length", "response_length"), _response),
    **dict.fromkeys(("eval_batch_size", "val_batch_size", "validation_batch_size"), _eval_rows),
}  # fmt: skip
