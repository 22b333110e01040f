"""What a person sees while a run trains: a progress bar on a terminal, plain greppable lines otherwise."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from maxbatch.training.checkpoints import Position


class Progression:
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
            self._bar.start()

    def append(self, record: dict[str, Any]) -> None:
        """Shows a record of `metrics.jsonl`."""
        step, line = record["step"], self._line(record)
        remarks = ["skipped: gradient not finite"] if record["skipped"] else []
        if "eval_loss" in record:
            remarks.append(f"eval loss {record['eval_loss']:.4f}")
        if "eval_pass_at_1" in record:
            greedy = record["eval_greedy_pass_at_1"]
            remarks.append(f"pass@1 {record['eval_pass_at_1']:.3f} (greedy {greedy:.3f})")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
            if remarks:
                self._bar.console.print(" | ".join([line, *remarks]))
        elif remarks or step % self._log_period == 0 or step in (1, self._total):
            self._console.print(" | ".join([line, *remarks]))

    def _line(self, record: dict[str, Any]) -> str:
        parts = [
            f"step {record['step']}/{self._total}",
            f"loss {record['loss']:.4f}",
            *([f"reward {record['reward']:.3f}"] if "reward" in record else []),
            f"batch {record['global_batch_size']}",
        ]
        if self._num_stages > 1:
            parts.append(f"stage {record['stage']}/{self._num_stages - 1}")
        parts += [f"lr {record['learning_rate']:.2e}", f"{record['tokens_per_second']:,.0f} tokens/s"]
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        return " | ".join(parts)

    def sync(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def nothing_left(run_dir: str, position: Position, unit: str) -> str:
    """What is said of a run that was complete when it was started; `unit` is what `samples_seen` counts."""
    return (
        f"{run_dir} is complete: {position.step} updates, {position.samples_seen:,} {unit}. "
        "To go on, raise its length; to start anew, give another run_dir."
    )


def end_of_run(run_dir: str, position: Position, unit: str, *, stopped_by: str | None, saved: bool) -> str:
    """What is said where a run ends, done or stopped; `unit` is what `samples_seen` counts."""
    where = f"step {position.step}, {position.samples_seen:,} {unit}, in {run_dir}"
    if stopped_by is None:
        return f"done: {where}"
    fate = "saved" if saved else "not saved (enable_checkpointing is false)"
    return f"stopped by {stopped_by} at {where}; {fate}. The same command goes on."
