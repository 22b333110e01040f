"""The progress of a run: a bar on a terminal, plain greppable lines otherwise."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from maxbatch.runs.metrics_schema import Metric
from maxbatch.runs.position import Position
from maxbatch.training.recorder import not_finite


class RunProgress:
    """Shows one run's updates.

    Args:
      console: where to; a terminal gets a bar, a pipe or file a line every `log_period` updates.
      total_steps: updates of the whole run.
      first_step: updates done at the start.
      num_stages: stages of the ramp, 1 without one.
      log_period: updates between lines.
    """

    def __init__(
        self, console: Console, total_steps: int, first_step: int, num_stages: int, log_period: int
    ) -> None:
        self._console, self._total, self._num_stages = console, total_steps, num_stages
        self._log_period = log_period
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(bar_width=16), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("left"), console=Console(highlight=False))
            self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def append(self, record: dict[str, Any]) -> None:
        """Shows a record of `metrics.jsonl`."""
        step, line = record[Metric.STEP], self._line(record)
        remarks = []
        if record[Metric.SKIPPED]:
            remarks.append(f"skipped: {not_finite(record)} is not finite")
        if Metric.EVAL_LOSS in record:
            remarks.append(f"eval loss {record[Metric.EVAL_LOSS]:.4f}")
        if Metric.EVAL_PASS_AT_1 in record:
            greedy = record[Metric.EVAL_GREEDY_PASS_AT_1]
            remarks.append(f"pass@1 {record[Metric.EVAL_PASS_AT_1]:.3f} (greedy {greedy:.3f})")
        if self._bar is not None:
            self._bar.start()  # once: not before the first update, so that what is printed until then stays whole
            self._bar.update(self._task, completed=step, description=line)
            if remarks:
                self._bar.console.print(" | ".join([line, *remarks]))
        elif remarks or step % self._log_period == 0 or step in (1, self._total):
            self._console.print(" | ".join([line, *remarks]))

    def _line(self, record: dict[str, Any]) -> str:
        parts = [
            f"step {record[Metric.STEP]}/{self._total}",
            f"loss {record[Metric.LOSS]:.4f}",
            *([f"reward {record[Metric.REWARD]:.3f}"] if Metric.REWARD in record else []),
            f"batch {record[Metric.GLOBAL_BATCH_SIZE]}",
        ]
        if self._num_stages > 1:
            parts.append(f"stage {record[Metric.STAGE]}/{self._num_stages - 1}")
        parts += [
            f"lr {record[Metric.LEARNING_RATE]:.2e}",
            f"{record[Metric.TOKENS_PER_SECOND]:,.0f} tokens/s",
        ]
        if record[Metric.MFU] is not None:
            parts.append(f"MFU {record[Metric.MFU]:.1%}")
        return " | ".join(parts)

    def sync(self) -> None:
        """Does nothing: nothing is held back."""

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()


def nothing_left(run_dir: str, position: Position, unit: str) -> str:
    """Returns the message for a run that was complete when it was started; `samples_seen` counts `unit`."""
    return (
        f"{run_dir} is complete: {position.step} updates, {position.samples_seen:,} {unit}. "
        "To go on, raise its length; to start anew, give another run_dir."
    )


def end_of_run(run_dir: str, position: Position, unit: str, *, stopped_by: str | None, saved: bool) -> str:
    """Returns the message for a run that is done or was stopped; `samples_seen` counts `unit`."""
    where = f"step {position.step}, {position.samples_seen:,} {unit}, in {run_dir}"
    if stopped_by is None:
        return f"done: {where}"
    fate = "saved" if saved else "not saved (enable_checkpointing is false)"
    return f"stopped by {stopped_by} at {where}; {fate}. The same command goes on."
