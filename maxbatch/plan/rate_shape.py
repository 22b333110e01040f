"""The learning rate over its peak, as a function of samples seen."""

from __future__ import annotations

import math

from maxbatch.config.sections import RatesConfig


def rate_shape(rates: RatesConfig, total_samples: int, samples_seen: int) -> float:
    """Returns the rate over its peak, from 0 to 1: the warm-up, then `learning_rate_schedule`.

    `cosine` (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983), `wsd` (warmup, stable, linear decay: Hu et
    al. 2024, https://arxiv.org/abs/2404.06395) and `constant`.
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
