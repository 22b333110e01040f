"""The arithmetic from the losses of branches to critical batch sizes, and from those to a schedule.

B batch (samples per update), L smoothed loss (nats per token), s position (samples seen).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxbatch.run.folder.metrics import Record, is_weightless
from maxbatch.run.folder.metrics_schema import Metric


class Chunk(NamedTuple):
    """A stretch of the stream at the end of a branch; the same samples in every branch of a
    checkpoint.
    """

    loss: float  # token-weighted mean over the chunk
    weight: float  # tokens that count


class CriticalSize(NamedTuple):
    """The critical batch size at one checkpoint."""

    batch_size: int  # the largest batch whose loss is within the tolerance
    is_at_least: bool  # the largest batch that was tried; the true value may be larger
    is_at_most: bool  # not even the second smallest batch is within; the true value may be smaller
    is_below_base: bool  # a smaller batch than the run's own is better by more than the tolerance


def last_chunks(records: Sequence[Record], first: int, end: int, size: int) -> list[Chunk] | None:
    """Returns the losses of `stream[first:end]` in chunks of `size` samples; None where a loss is
    not finite.

    The records, lines of `metrics.jsonl` in order, are of updates that each lie within one chunk.
    ValueError: they do not cover the range, whose length is a multiple of `size`.
    """
    inside = [record for record in records if first < record[Metric.SAMPLES_SEEN] <= end]
    if any(record[Metric.LOSS] is None and not is_weightless(record) for record in inside):
        return None
    chunks = []
    for _, group in itertools.groupby(
        inside, lambda r: (r[Metric.SAMPLES_SEEN] - 1 - first) // size
    ):
        updates = list(group)
        if sum(update[Metric.GLOBAL_BATCH_SIZE] for update in updates) == size:
            chunks.append(
                _merged([Chunk(u[Metric.LOSS] or 0.0, u[Metric.LOSS_WEIGHT]) for u in updates])
            )
    if len(chunks) * size != end - first:
        raise ValueError(f"the records do not cover samples {first} to {end}")
    return chunks


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    weight = sum(chunk.weight for chunk in chunks)
    return Chunk(sum(chunk.loss * chunk.weight for chunk in chunks) / max(weight, 1e-9), weight)


def smoothed(chunks: Sequence[Chunk]) -> float:
    """Returns the token-weighted mean loss of chunks."""
    return _merged(chunks).loss


def standard_error(chunks: Sequence[Chunk], base: Sequence[Chunk]) -> float | None:
    """Returns the standard error of the difference of two branches' smoothed losses, paired chunk
    by chunk.

    The chunks hold the same samples in both, so the remaining noise comes from training and not
    from the data. Consecutive chunks are not independent, so this is a lower bound. None for fewer
    than two chunks.
    """
    differences = [mine.loss - its.loss for mine, its in zip(chunks, base, strict=True)]
    return (
        statistics.stdev(differences) / math.sqrt(len(differences))
        if len(differences) > 1
        else None
    )


def critical_batch(losses: Mapping[int, float | None], base: int, tolerance: float) -> CriticalSize:
    """Returns the critical batch size at a checkpoint, from each batch's L, None where its branch
    diverged.

    It is the largest B with L(b) <= L(base) + tolerance for every b that was tried from the base to
    B. Where a smaller batch b has L(b) < L(base) - tolerance, or the base diverged, the base is
    beyond it; then it is the largest B below the base with L(b) <= L(smallest) + tolerance for
    every b from the smallest to B.
    """
    batches = sorted(losses)
    loss = {batch: math.inf if value is None else value for batch, value in losses.items()}
    smaller = [b for b in batches if b < base]
    is_below = loss[base] == math.inf or any(loss[b] < loss[base] - tolerance for b in smaller)
    candidates = (smaller or [base]) if is_below else [b for b in batches if b >= base]
    *_, largest = itertools.takewhile(
        lambda b: loss[b] <= loss[candidates[0]] + tolerance, candidates
    )
    return CriticalSize(
        largest, largest == batches[-1], is_below and largest == batches[0], is_below
    )


def schedule(points: Sequence[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Returns the batch warmup that measured critical batch sizes allow, as (samples, batch), the
    first at 0.

    The points are (samples seen, critical batch size) of the checkpoints, positions above 0 and
    rising. The batch starts at `start` and is doubled where the allowed batch reaches its double.
    What is allowed at a checkpoint is the smallest critical batch measured there or later, so that
    no stage exceeds a later measurement. Between two checkpoints it is interpolated, log B over log
    s; before the first one nothing but `start` is allowed, after the last one its limit stays.
    """
    positions, batches = zip(*points, strict=True)
    smallest_later = list(itertools.accumulate(reversed(batches), min))[::-1]
    allowed = list(zip(positions, smallest_later, strict=True))
    stages, batch = {0: start}, 2 * start
    while batch <= smallest_later[-1]:
        # of two doublings at one position the second counts
        stages[_reaches(allowed, batch)] = batch
        batch *= 2
    return list(stages.items())


def _reaches(allowed: Sequence[tuple[int, int]], batch: int) -> int:
    """Returns the position from which on a rising curve through the points is at least `batch`."""
    index = next(i for i, (_, value) in enumerate(allowed) if value >= batch)
    position, value = allowed[index]
    if index == 0:
        return position
    before, below = allowed[index - 1]
    share = math.log(batch / below) / math.log(value / below)
    # without rounding errors: 400.0000000001 is 400
    reached: int = math.ceil(before * (position / before) ** share - 1e-6)
    return reached
