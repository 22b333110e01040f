"""The progress of a run: plain greppable lines, and below them a bar on a terminal."""

from __future__ import annotations

import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress

from maxbatch.runs.metrics_schema import Metric, find_metric
from maxbatch.system.bars import LINE_S, Pace, progress_bar
from maxbatch.system.folding import folded_parts
from maxbatch.system.terminal import PlainConsole
from maxbatch.training.record.recorder import not_finite


class RunProgress:
    """Shows one run's updates: a line every `log_period` updates, and on a terminal a bar as well.

    Elsewhere a line follows at the latest after half a minute, also while an update or a compilation takes longer.
    A run starts after `first_step` updates of `total_steps`; `num_stages` is 1 without a ramp.
    """

    def __init__(self, console: Console, total_steps: int, first_step: int, num_stages: int, log_period: int) -> None:
        self._console, self._total = console, total_steps
        self._num_stages, self._log_period = num_stages, log_period
        self._bar: Progress | None = None
        self._step, self._unprinted, self._printed_at = first_step, "", time.monotonic()
        self._is_closed = threading.Event()
        if console.is_terminal:
            self._bar = progress_bar(PlainConsole(), Pace(total_steps, first_step))
            self._task = self._bar.add_task("", total=total_steps, completed=first_step)
        elif not console.quiet:
            threading.Thread(target=self._keep_printing, name="maxbatch-lines", daemon=True).start()

    def _keep_printing(self) -> None:
        while not self._is_closed.wait(max(0.0, self._printed_at + LINE_S - time.monotonic())):
            silent_s = time.monotonic() - self._printed_at
            if silent_s >= LINE_S:
                waits = f"step {self._step}/{self._total} | {silent_s:.0f} s without an update"
                self._print(self._unprinted or waits)

    def _print(self, line: str) -> None:
        self._unprinted, self._printed_at = "", time.monotonic()
        console = self._bar.console if self._bar is not None else self._console
        console.print(folded_parts(line.split(" | "), console.width if console.is_terminal else None))

    def append(self, record: dict[str, Any]) -> None:
        """Shows a record of `metrics.jsonl`."""
        step, line = record[Metric.STEP], self._line(record)
        remarks = []
        if record[Metric.SKIPPED]:
            remarks.append(f"skipped: {not_finite(record)} is not finite")
        if Metric.EVAL_LOSS in record:
            averaged = record.get(Metric.EVAL_LOSS_AVERAGED)
            of_average = "" if averaged is None else f" (averaged {averaged:.4f})"
            remarks.append(f"eval loss {record[Metric.EVAL_LOSS]:.4f}{of_average}")
        for name, score in record.items():
            if find_metric(name) is Metric.EVAL_TASK:
                remarks.append(f"{name.removeprefix(Metric.EVAL_TASK.of(''))} {score:.4g}")
        if Metric.EVAL_PASS_AT_1 in record:
            greedy = record[Metric.EVAL_GREEDY_PASS_AT_1]
            remarks.append(f"pass@1 {record[Metric.EVAL_PASS_AT_1]:.3f} (greedy {greedy:.3f})")
        if self._bar is not None:
            self._bar.start()  # once, at the first update, so that text printed before stays intact
            self._bar.update(self._task, completed=step, description=line)
        self._step, self._unprinted = step, line
        if remarks or step % self._log_period == 0 or step in (1, self._total):
            self._print(" | ".join([line, *remarks]))

    def _line(self, record: dict[str, Any]) -> str:
        reward, mfu = record.get(Metric.REWARD), record[Metric.MFU]
        parts = (
            f"step {record[Metric.STEP]}/{self._total}",
            "loss -" if record[Metric.LOSS] is None else f"loss {record[Metric.LOSS]:.4f}",
            None if reward is None else f"reward {reward:.3f}",
            f"batch {record[Metric.GLOBAL_BATCH_SIZE]}",
            f"stage {record[Metric.STAGE]}/{self._num_stages - 1}" if self._num_stages > 1 else None,
            f"lr {record[Metric.LEARNING_RATE]:.2e}",
            f"{record[Metric.TOKENS_PER_SECOND]:,.0f} tokens/s",
            None if mfu is None else f"MFU {mfu:.1%}",
        )
        return " | ".join(filter(None, parts))

    def sync(self) -> None:
        """Does nothing: there is no buffer."""

    def close(self) -> None:
        """Ends the bar and the lines."""
        self._is_closed.set()
        if self._bar is not None:
            self._bar.stop()
