"""Iterations and samples that other programs skip, as `skip_samples` and the length that is left.

There a skipped iteration reads its batch and counts as an iteration; here an update trains.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from maxbatch.plan.holes import Holes

# Megatron-LM's iterations, counted from 1; FlagScale's ranges, whose ends are not included:
# iterations counted from 0, and samples, of which it leaves out whole iterations; and the ranges of
# Megatron-DeepSpeed, counted from 1, whose ends are included.
ITERATIONS, RANGE_OF_ITERATIONS, RANGE_OF_SAMPLES, RANGES_OF_ITERATIONS = SKIPPING = (
    "iterations_to_skip",
    "skip_iters_range",
    "skip_samples_range",
    "skip_train_iteration_range",
)


class Batches(NamedTuple):
    """The batches of a run."""

    position_after: Callable[[int], int]  # samples after so many iterations
    step_at: Callable[[int], int]  # whole iterations before a sample

    @classmethod
    def constant(cls, batch: int) -> Batches:
        """Returns batches of one size."""
        return cls(lambda iterations: iterations * batch, lambda sample: sample // batch)


class Skipped(NamedTuple):
    """What is skipped, in iterations counted from 0 and in samples."""

    iterations: Holes
    samples: Holes

    def with_others(self, other: Skipped) -> Skipped:
        """Returns what either skips."""
        return Skipped(
            self.iterations.merged_with(other.iterations), self.samples.merged_with(other.samples)
        )


def skipped(word: str, text: str, batches: Batches) -> Skipped | None:
    """Returns what a word of `SKIPPING` skips; None for a value that the other program refuses."""
    numbers = [int(number) for number in re.findall(r"\d{1,15}", text)]
    pairs = list(zip(numbers[::2], numbers[1::2], strict=False))
    ranges: list[tuple[int, int]] = []
    if word == ITERATIONS:
        ranges = [(number - 1, number) for number in numbers]
    elif word == RANGES_OF_ITERATIONS and len(numbers) % 2 == 0:
        ranges = [(first - 1, last) for first, last in pairs]
    elif len(numbers) == 2:
        (first, end) = numbers
        ranges = [(first, end)]
        if word == RANGE_OF_SAMPLES and first < end:
            ranges = [(batches.step_at(first), batches.step_at(end - 1) + 1)]
    if not ranges or any(not 0 <= first < end for first, end in ranges):
        return None
    samples = Holes(
        (batches.position_after(first), batches.position_after(end)) for first, end in ranges
    )
    return Skipped(Holes(ranges), samples)
