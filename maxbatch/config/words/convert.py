"""Values of other frameworks' words converted to ours, where the table of words is not enough."""

from __future__ import annotations

from fractions import Fraction

from maxbatch.config.values import schedule_text


def rampup_schedule(start: int, rise: int, samples: int, batch: int) -> str | None:
    """Returns `batch_size_schedule` for Megatron-LM's `--rampup-batch-size START RISE SAMPLES`, up to a global batch.

    None where the batch is not reached in whole steps, which Megatron-LM refuses as well.
    """
    if min(start, rise, samples) < 1 or batch <= start or (batch - start) % rise:
        return None
    n = (batch - start) // rise
    return schedule_text((Fraction(i * samples, n), start + i * rise) for i in range(n + 1))
