"""The arithmetic from the losses of branches to critical batch sizes, and from those to a schedule.

B batch (samples per update), L smoothed loss (nats per token), s position (samples seen).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxbatch.runs.metrics_schema import Metric


class Chunk(NamedTuple):
    """A stretch of the stream at the end of a branch; the same samples in every branch of a checkpoint."""

    loss: float  # token-weighted mean over the chunk
    weight: float  # tokens that count


class CriticalSize(NamedTuple):
    """The critical batch size at one checkpoint.

    Attributes:
      batch_size: the largest batch whose loss is within the tolerance.
      is_at_least: the largest batch that was tried still is; the critical one may be larger.
      is_at_most: not even the second smallest batch that was tried is; the critical one may be smaller.
      is_below_base: a smaller batch than the run's own is better by more than the tolerance.
    """

    batch_size: int
    is_at_least: bool
    is_at_most: bool
    is_below_base: bool


def last_chunks(records: Sequence[Mapping[str, Any]], first: int, end: int, size: int) -> list[Chunk] | None:
    """Returns the losses of `stream[first:end]` in chunks of `size` samples.

    Args:
      records: lines of `metrics.jsonl`, of updates that each lie within one chunk.
      first: first sample.
      end: one past the last sample; end - first is a multiple of size.
      size: samples of a chunk.

    Returns:
      The chunks; None where a loss is not finite.

    Raises:
      ValueError: the records do not cover the range.
    """
    sums: dict[int, float] = {}
    weights: dict[int, float] = {}
    samples: dict[int, int] = {}
    for record in records:
        position = record[Metric.SAMPLES_SEEN]
        if not first < position <= end:
            continue
        if record[Metric.LOSS] is None:
            return None
        chunk, weight = (position - 1 - first) // size, record[Metric.LOSS_WEIGHT]
        sums[chunk] = sums.get(chunk, 0.0) + record[Metric.LOSS] * weight
        weights[chunk] = weights.get(chunk, 0.0) + weight
        samples[chunk] = samples.get(chunk, 0) + record[Metric.GLOBAL_BATCH_SIZE]
    wanted = range((end - first) // size)
    if any(samples.get(chunk) != size for chunk in wanted):
        raise ValueError(f"the records do not cover samples {first} to {end}")
    return [Chunk(sums[chunk] / max(weights[chunk], 1e-9), weights[chunk]) for chunk in wanted]


def smoothed(chunks: Sequence[Chunk]) -> float:
    """Returns the token-weighted mean loss of chunks."""
    total = sum(chunk.weight for chunk in chunks)
    return sum(chunk.loss * chunk.weight for chunk in chunks) / max(total, 1e-9)


def standard_error(chunks: Sequence[Chunk], base: Sequence[Chunk]) -> float | None:
    """Returns the standard error of the difference of two branches' smoothed losses, paired chunk by chunk.

    The chunks hold the same samples in both, so that what is left is noise of the training and not of the data.
    Chunks follow one another and are not independent: take it as a floor. None for fewer than two chunks.
    """
    differences = [mine.loss - its.loss for mine, its in zip(chunks, base, strict=True)]
    return statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None


def critical_batch(losses: Mapping[int, float | None], base: int, tolerance: float) -> CriticalSize:
    """Returns the critical batch size at a checkpoint.

    It is the largest B with L(b) <= L(base) + tolerance for every b that was tried from the base to B. Where a smaller
    batch b has L(b) < L(base) - tolerance, or the base diverged, the base is beyond it; then it is the largest B with
    L(b) <= L(smallest) + tolerance for every b from the smallest to B.

    Args:
      losses: batch to smoothed loss, None where the branch diverged.
      base: the run's batch, one of `losses`.
      tolerance: absolute, nats per token.
    """
    batches = sorted(losses)
    loss = {batch: math.inf if value is None else value for batch, value in losses.items()}
    is_below = loss[base] == math.inf or any(loss[b] < loss[base] - tolerance for b in batches if b < base)
    start = batches[0] if is_below else base
    found = start
    for batch in (b for b in batches if b > start):
        if not loss[batch] <= loss[start] + tolerance:
            break
        found = batch
    if is_below:
        found = min(found, max((b for b in batches if b < base), default=base))
    return CriticalSize(found, found == batches[-1], is_below and found == batches[0], is_below)


def schedule(points: Sequence[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Returns the batch warmup that measured critical batch sizes allow, as (samples, batch), the first at 0.

    The batch starts at `start` and is doubled where the allowed batch reaches its double. What is allowed at a
    checkpoint is the smallest critical batch measured there or later, so that no stage exceeds a later
    measurement. Between two checkpoints it is interpolated, log B over log s; before the first one nothing but
    `start` is allowed, after the last one what is allowed there.

    Args:
      points: (samples seen, critical batch size) of each checkpoint, positions above 0 and rising.
      start: the batch at the start of the run.
    """
    allowed: list[tuple[int, int]] = []
    for position, batch in reversed(points):
        allowed.insert(0, (position, min(batch, allowed[0][1]) if allowed else batch))
    stages = [(0, start)]
    batch = 2 * start
    while batch <= max((value for _, value in allowed), default=0):
        position = _reaches(allowed, batch)
        if stages[-1][0] == position:
            stages.pop()
        stages.append((position, batch))
        batch *= 2
    return stages


def _reaches(allowed: Sequence[tuple[int, int]], batch: int) -> int:
    """Returns the position from which on a rising curve through the points is at least `batch`."""
    index = next(i for i, (_, value) in enumerate(allowed) if value >= batch)
    position, value = allowed[index]
    if index == 0:
        return position
    before, below = allowed[index - 1]
    share = math.log(batch / below) / math.log(value / below)
    # minus the rounding: 400.0000000001 is 400
    return math.ceil(before * (position / before) ** share - 1e-6)


def schedule_text(stages: Sequence[tuple[int, int]]) -> str:
    """Returns stages as `batch_size_schedule` writes them."""
    return " ".join(f"{position}:{batch}" for position, batch in stages)
