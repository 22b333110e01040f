"""The learning rate over its peak, as a function of samples seen."""

from __future__ import annotations

import math
from fractions import Fraction

from maxbatch.config.sections import RatesConfig
from maxbatch.config.values import exact

# Phase over pi of a half wave, by its cosine: the only pairs of rational numbers (Niven's theorem).
_PHASES = {
    Fraction(1): Fraction(0),
    Fraction(1, 2): Fraction(1, 3),
    Fraction(0): Fraction(1, 2),
    Fraction(-1, 2): Fraction(2, 3),
    Fraction(-1): Fraction(1),
}


def rate_shape(rates: RatesConfig, total_samples: int, samples_seen: int) -> float:
    """Returns the rate over its peak, from 0 to 1: the warm-up, then `learning_rate_schedule`.

    `cosine` (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983), `wsd` (warmup, stable,
    linear decay: Hu et al. 2024, https://arxiv.org/abs/2404.06395) and `constant`.
    """
    last: float = rates.learning_rate_final_fraction
    warmup: float = rates.warmup_steps_fraction * total_samples
    if samples_seen < warmup:
        return samples_seen / warmup
    left = max(0.0, total_samples - samples_seen)
    if rates.learning_rate_schedule == "constant":
        return 1.0
    if rates.learning_rate_schedule == "wsd":
        decay: float = rates.wsd_decay_steps_fraction * total_samples
        return 1.0 if left >= decay else last + (1 - last) * left / decay
    span = total_samples - warmup
    cosine = 0.5 * (1 - math.cos(math.pi * left / span)) if span > 0 else 1.0
    return last + (1 - last) * cosine


def rate_shape_by_updates(rates: RatesConfig, total_updates: int, updates: int) -> float:
    """Returns the rate over its peak after `updates` updates, as MaxText has it
    (`utils/maxtext_utils.py`, 0.2.5).

    The warm-up and wsd's decay are whole numbers of updates, rounded down in double precision as
    there. The last update has the last rate. After `learning_rate_schedule_steps` the rate is 0.
    """
    length = (
        total_updates
        if rates.learning_rate_schedule_steps == -1
        else rates.learning_rate_schedule_steps
    )
    last: float = rates.learning_rate_final_fraction
    warmup = int(length * float(rates.warmup_steps_fraction))
    if updates < warmup:
        return updates / warmup
    if rates.learning_rate_schedule == "constant":
        return 1.0
    if updates >= length:
        return 0.0 if total_updates > length else last
    if rates.learning_rate_schedule == "wsd":
        decay = int(length * float(rates.wsd_decay_steps_fraction))
        updates_of_decay = updates - (length - decay)
        return (
            1.0
            if updates_of_decay <= 0 or decay < 2
            else 1 + (last - 1) * updates_of_decay / (decay - 1)
        )
    span = length - warmup
    share = (updates - warmup) / (span - 1) if span > 1 else 1.0
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * share))


def warm_up_end(rates: RatesConfig, total_samples: int) -> Fraction:
    """Returns the samples of the warm-up, exactly."""
    return exact(rates.warmup_steps_fraction) * total_samples


def has_fallen(rates: RatesConfig, total_samples: int, samples_seen: int, level: Fraction) -> bool:
    """Returns whether the rate after the warm-up is at most `level` < 1 of its peak; equality is
    exact.
    """
    last, left = exact(rates.learning_rate_final_fraction), total_samples - samples_seen
    if last == 1 or rates.learning_rate_schedule == "constant":
        return False
    falls_to = (level - last) / (1 - last)  # of the falling part
    if rates.learning_rate_schedule == "wsd":
        return left <= falls_to * exact(rates.wsd_decay_steps_fraction) * total_samples
    warmup, cosine = warm_up_end(rates, total_samples), 2 * falls_to - 1
    phase = (samples_seen - warmup) / (total_samples - warmup)
    return phase >= _PHASES[cosine] if cosine in _PHASES else math.cos(math.pi * phase) <= cosine
