"""The results of a measurement: the table, the JSON, and the command that trains with the
schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from typing import NamedTuple

from maxbatch.around.critical_batch.branches import Branches
from maxbatch.around.critical_batch.critical_size import (
    CriticalSize,
    critical_batch,
    schedule,
    smoothed,
    standard_error,
)
from maxbatch.around.critical_batch.measured_run import Fork, MeasuredRun
from maxbatch.around.critical_batch.plan import MeasurementPlan
from maxbatch.config.values import schedule_text
from maxbatch.system.errors import TrainingError
from maxbatch.system.terminal.terminal import PlainTable

TOLERANCE_UNIT = "nats per token, absolute"
_HEADS = ("step", "samples", "batch", "lr", "updates", "loss", "against base", "within")


class BranchResult(NamedTuple):
    """A branch at its end."""

    batch_size: int
    learning_rate: float
    updates: int
    loss: float | None  # smoothed; None where it diverged
    difference: float | None  # difference from the base branch's, if both have one
    standard_error: float | None  # of the difference
    folder: str

    def against_base(self) -> str:
        if self.difference is None:
            return "-"
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.difference:+.4f}{error}"

    def within(self, tolerance: float) -> str:
        """Returns whether the branch is within the tolerance, with a question mark if noise exceeds
        the gap.
        """
        if self.difference is None:
            return "no" if self.loss is None else "yes"
        is_doubtful = abs(self.difference - tolerance) < (self.standard_error or 0)
        return ("yes" if self.difference <= tolerance else "no") + ("?" if is_doubtful else "")


class ForkResult(NamedTuple):
    """The results of the branches of a checkpoint."""

    fork: Fork
    branches: list[BranchResult]  # the smallest batch first
    critical: CriticalSize

    def __str__(self) -> str:
        """Returns the critical batch size in one line."""
        critical, fork = self.critical, self.fork
        bound = "at least " if critical.is_at_least else "at most " * critical.is_at_most
        at = f"step {fork.step:,} ({fork.samples_seen:,} samples)"
        below = f", below the run's own {fork.batch_size:,}" if critical.is_below_base else ""
        return f"{at}: critical batch size {bound}{critical.batch_size:,}{below}"

    def to_json(self) -> dict[str, object]:
        critical = self.critical._asdict()
        return {
            **dataclasses.asdict(self.fork),
            "critical_batch_size": critical.pop("batch_size"),
            **critical,
            "in_words": str(self),
            "branches": [branch._asdict() for branch in self.branches],
        }


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measurement whose branches are done."""

    run: MeasuredRun
    plan: MeasurementPlan
    branches: Branches
    tolerance: float

    @functools.cached_property
    def forks(self) -> list[ForkResult]:
        """Returns the results of every checkpoint; raises TrainingError if every branch of one
        diverged.
        """
        return [self._fork_result(fork) for fork in self.plan.forks]

    def _fork_result(self, fork: Fork) -> ForkResult:
        branches, scaling = self.plan.branches(fork), self.plan.scaling
        chunks = {branch.batch_size: self.branches.chunks(branch) for branch in branches}
        losses = {batch: None if ends is None else smoothed(ends) for batch, ends in chunks.items()}
        if all(loss is None for loss in losses.values()):
            raise TrainingError(
                f"every branch of step {fork.step} diverged; measure at other --checkpoints, or "
                "lower learning_rate"
            )
        base, base_scale = chunks[fork.batch_size], self.run.scale(fork.batch_size, scaling)
        results = []
        for branch in branches:
            batch, ends = branch.batch_size, chunks[branch.batch_size]
            rate = fork.learning_rate * self.run.scale(batch, scaling) / base_scale
            difference = error = None
            if ends is not None and base is not None:
                difference, error = smoothed(ends) - smoothed(base), standard_error(ends, base)
            folder = str(self.branches.folder(branch))
            results.append(
                BranchResult(batch, rate, branch.updates, losses[batch], difference, error, folder)
            )
        return ForkResult(fork, results, critical_batch(losses, fork.batch_size, self.tolerance))

    @property
    def stages(self) -> list[tuple[int, int]]:
        """The resulting schedule, as (samples, batch); starts below the run's own batch if that was
        too large.
        """
        points = [(result.fork.samples_seen, result.critical.batch_size) for result in self.forks]
        return schedule(points, min(self.run.first_batch_size, *(batch for _, batch in points)))

    @property
    def command(self) -> str:
        """The command that trains a new run by the schedule, on the same number of samples.

        The rate of the first batch is the run's own, and the same rule scales that of every other
        batch.
        """
        run, config, scaling = self.run, self.run.config, self.plan.scaling
        words = [
            "maxbatch",
            "train",
            str(run.path / "config.yml"),
            f"run_dir={run.path}-batch-warmup",
            f"batch_size_schedule={schedule_text(self.stages)}",
            f"learning_rate_scaling={scaling}",
            f"reference_batch_size={run.reference_batch_size}",
        ]
        if config.learning_rate_scaling != scaling:
            first = run.first_batch_size
            rate = config.learning_rate * run.scale(first, config.learning_rate_scaling)
            words.append(f"learning_rate={rate / run.scale(first, scaling)!r}")
        if config.steps is not None:
            words.append(f"train_samples={run.total_samples}")
        return shlex.join(words)

    def to_json(self) -> dict[str, object]:
        """Returns all measurements, and the resulting schedule and command."""
        return {
            "run": str(self.run.path),
            "tolerance": self.tolerance,
            "tolerance_unit": TOLERANCE_UNIT,
            "learning_rate_scaling": self.plan.scaling,
            "decays": self.plan.decays,
            "factors": [str(factor) for factor in self.plan.factors],
            "samples_per_branch": self.plan.samples,
            "samples_compared": self.plan.compared,
            "checkpoints": [result.to_json() for result in self.forks],
            "batch_size_schedule": schedule_text(self.stages),
            "reference_batch_size": self.run.reference_batch_size,
            "command": self.command,
        }

    def table(self) -> PlainTable:
        """Returns the table of all branches; `*` marks the critical batch of a checkpoint."""
        table = PlainTable(*_HEADS, justify="right")
        for fork, branches, critical in self.forks:
            place = [f"{fork.step:,}", f"{fork.samples_seen:,}"]
            for branch in branches:
                is_critical = branch.batch_size == critical.batch_size
                is_base = branch.batch_size == fork.batch_size
                table.add_row(
                    *place,
                    f"{'*' if is_critical else ''}{branch.batch_size:,}",
                    f"{branch.learning_rate:.2e}",
                    f"{branch.updates:,}",
                    "diverged" if branch.loss is None else f"{branch.loss:.4f}",
                    *(
                        ("base", "")
                        if is_base
                        else (branch.against_base(), branch.within(self.tolerance))
                    ),
                    style="bold" if is_critical else None,
                )
                place = ["", ""]
        return table
