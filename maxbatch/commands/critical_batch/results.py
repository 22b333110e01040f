"""The results of a measurement: the table, the JSON, and the command that trains by the schedule."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from maxbatch.commands.critical_batch.branches import Branches
from maxbatch.commands.critical_batch.critical_size import (
    CriticalSize,
    critical_batch,
    schedule,
    schedule_text,
    smoothed,
    standard_error,
)
from maxbatch.commands.critical_batch.measured_run import Fork, MeasuredRun
from maxbatch.commands.critical_batch.plan import MeasurementPlan
from maxbatch.system.errors import TrainingError

TOLERANCE_UNIT = "nats per token, absolute"


@dataclasses.dataclass(frozen=True)
class BranchResult:
    """A branch at its end.

    Attributes:
      batch_size: samples per update.
      learning_rate: its constant rate.
      updates: updates that it took.
      loss: smoothed loss; None where it diverged.
      difference: from the base branch's, where both have one.
      standard_error: of the difference.
      folder: its run folder.
    """

    batch_size: int
    learning_rate: float
    updates: int
    loss: float | None
    difference: float | None
    standard_error: float | None
    folder: str


class ForkResult(NamedTuple):
    """The results of the branches of a checkpoint.

    Attributes:
      fork: the checkpoint.
      branches: its branches, the smallest batch first.
      critical: the critical batch size there.
    """

    fork: Fork
    branches: tuple[BranchResult, ...]
    critical: CriticalSize


def fork_results(
    run: MeasuredRun, plan: MeasurementPlan, branches: Branches, tolerance: float
) -> list[ForkResult]:
    """Returns the results of every checkpoint.

    Raises:
      TrainingError: every branch of a checkpoint diverged.
    """
    return [_fork_result(run, plan, branches, fork, tolerance) for fork in plan.forks]


def _fork_result(
    run: MeasuredRun, plan: MeasurementPlan, branches: Branches, fork: Fork, tolerance: float
) -> ForkResult:
    of_batch = {branch.batch_size: branches.chunks(branch) for branch in plan.branches(fork)}
    losses = {batch: None if chunks is None else smoothed(chunks) for batch, chunks in of_batch.items()}
    if all(loss is None for loss in losses.values()):
        raise TrainingError(
            f"every branch of step {fork.step} diverged; measure at other --checkpoints, or lower learning_rate"
        )
    own, own_loss = of_batch[fork.batch_size], losses[fork.batch_size]
    own_scale = run.scale(fork.batch_size, plan.scaling)
    results = []
    for branch in plan.branches(fork):
        chunks, loss = of_batch[branch.batch_size], losses[branch.batch_size]
        results.append(BranchResult(
            branch.batch_size,
            fork.learning_rate * run.scale(branch.batch_size, plan.scaling) / own_scale,
            branch.samples // branch.batch_size,
            loss,
            None if loss is None or own_loss is None else loss - own_loss,
            None if chunks is None or own is None else standard_error(chunks, own),
            str(branches.folder(branch)),
        ))  # fmt: skip
    return ForkResult(fork, tuple(results), critical_batch(losses, fork.batch_size, tolerance))


def warmup_schedule(run: MeasuredRun, results: Sequence[ForkResult]) -> list[tuple[int, int]]:
    """Returns the schedule that follows, as (samples, batch)."""
    points = [(result.fork.samples_seen, result.critical.batch_size) for result in results]
    return schedule(points, run.first_batch_size)


def train_command(run: MeasuredRun, plan: MeasurementPlan, stages: Sequence[tuple[int, int]]) -> list[str]:
    """Returns the words of the command that trains the run anew by a schedule, on as many samples.

    The rate of the first batch is the run's own, and with the same rule that of every other batch too.
    """
    config, first = run.config, run.first_batch_size
    words = [
        "maxbatch", "train", str(run.path / "config.yml"), f"run_dir={run.path}-batch-warmup",
        f"batch_size_schedule={schedule_text(stages)}", f"learning_rate_scaling={plan.scaling}",
        f"reference_batch_size={run.reference_batch_size}",
    ]  # fmt: skip
    if config.learning_rate_scaling != plan.scaling:
        rate = config.learning_rate * run.scale(first, config.learning_rate_scaling)
        words.append(f"learning_rate={rate / run.scale(first, plan.scaling)!r}")
    if config.steps is not None:
        words.append(f"train_samples={run.total_samples}")
    return words


def to_json(
    run: MeasuredRun, plan: MeasurementPlan, results: Sequence[ForkResult], tolerance: float
) -> dict[str, Any]:
    """Returns everything that was measured, and the schedule and the command that follow."""
    stages = warmup_schedule(run, results)
    return {
        "run": str(run.path),
        "tolerance": tolerance,
        "tolerance_unit": TOLERANCE_UNIT,
        "learning_rate_scaling": plan.scaling,
        "factors": [str(factor) for factor in plan.factors],
        "samples_per_branch": plan.samples,
        "samples_compared": plan.compared,
        "checkpoints": [
            {
                **dataclasses.asdict(result.fork),
                **{f"critical_{key}" if key == "batch_size" else key: value
                   for key, value in result.critical._asdict().items()},
                "in_words": in_words(result),
                "branches": [dataclasses.asdict(branch) for branch in result.branches],
            }
            for result in results
        ],
        "batch_size_schedule": schedule_text(stages),
        "reference_batch_size": run.reference_batch_size,
        "command": shlex.join(train_command(run, plan, stages)),
    }  # fmt: skip


def results_table(results: Sequence[ForkResult], tolerance: float) -> Table:
    """Returns the table of all branches; `*` marks the critical batch of a checkpoint."""
    table = Table(box=None, header_style="bold underline", padding=(0, 2, 0, 0))
    for head in (
        "checkpoint", "samples", "batch", "learning rate", "updates", "loss", "against base", "within",
    ):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    for fork, branches, critical in results:
        for index, branch in enumerate(branches):
            is_base, is_critical = (
                branch.batch_size == size for size in (fork.batch_size, critical.batch_size)
            )
            table.add_row(
                f"{fork.step:,}" if index == 0 else "",
                f"{fork.samples_seen:,}" if index == 0 else "",
                f"{'*' if is_critical else ''}{branch.batch_size:,}",
                f"{branch.learning_rate:.2e}",
                f"{branch.updates:,}",
                "diverged" if branch.loss is None else f"{branch.loss:.4f}",
                "base" if is_base else _against(branch),
                "" if is_base else _within(branch, tolerance),
                style="bold" if is_critical else None,
            )
    return table


def _against(branch: BranchResult) -> str:
    if branch.difference is None:
        return "-"
    error = "" if branch.standard_error is None else f" ± {branch.standard_error:.4f}"
    return f"{branch.difference:+.4f}{error}"


def _within(branch: BranchResult, tolerance: float) -> str:
    """Returns whether a branch is within the tolerance, with a question mark if its noise is larger than the gap."""
    if branch.difference is None:
        return "no" if branch.loss is None else "yes"
    is_doubtful = abs(branch.difference - tolerance) < (branch.standard_error or 0)
    return ("yes" if branch.difference <= tolerance else "no") + ("?" if is_doubtful else "")


def in_words(result: ForkResult) -> str:
    """Returns a checkpoint's critical batch size in one line."""
    critical, fork = result.critical, result.fork
    bound = "at least " if critical.is_at_least else "at most " if critical.is_at_most else ""
    line = f"step {fork.step:,} ({fork.samples_seen:,} samples): critical batch size {bound}{critical.batch_size:,}"
    return line + (f"; the run's own, {fork.batch_size:,}, is beyond it" if critical.is_below_base else "")
