"""How Megatron-LM and MaxText ramp the batch, in a few lines each; shared by the tests that compare
with them.
"""

from __future__ import annotations

from collections.abc import Callable


def megatron_rampup(start: int, rise: int, samples: int, batch: int) -> Callable[[int], int]:
    """`--rampup-batch-size START INCREMENT SAMPLES --global-batch-size B`: the batch by consumed
    samples.
    """
    apart = samples / ((batch - start) // rise)

    def batch_at(consumed: int) -> int:
        return batch if consumed > samples else start + int(consumed / apart) * rise

    return batch_at


def megatron_schedule(text: str, sequence_length: int) -> Callable[[int], int]:
    """`--step-batch-size-schedule "0:768 250B:1536"`: thresholds in tokens, cut down to whole
    samples.
    """
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    stages = []
    for word in text.split():
        tokens, batch = word.split(":")
        scale = units.get(tokens[-1], 1)
        number = tokens[:-1] if tokens[-1] in units else tokens
        stages.append((int(float(number) * scale) // sequence_length, int(batch)))
    return lambda consumed: next(batch for first, batch in reversed(stages) if consumed >= first)


def maxtext_batches(
    start: int, rise: int, end: int, increments: int, samples: float, *, updates: int
) -> list[int]:
    """The batches of MaxText's ramp without accumulation: each stage counts from its own first
    sample.
    """
    batches, batch, in_stage = [], start, 0
    for _ in range(updates):
        batches.append(batch)
        in_stage += batch
        if in_stage >= samples / increments:
            batch, in_stage = min(batch + rise, end), 0
    return batches
