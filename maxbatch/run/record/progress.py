"""The progress of a run: greppable lines, with a bar below them on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console

from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric, SkipReason, find_metric
from maxbatch.run.folder.sessions import TimePart
from maxbatch.run.record.recorder import Output, not_finite
from maxbatch.system.terminal.bars import LINE_S, Bar, Pace, progress_bar
from maxbatch.system.terminal.folding import folded, folded_parts

_TICK_S = 1.0  # between updates of the bar
_LONGEST_PAUSE = 10  # times `LINE_S`
_SLOW_COMPILE_S = 100.0  # XLA writes its "Very slow compile?" to standard error after 120 s
_OF_SLOW_COMPILE = (
    "a large program takes minutes to compile (`maxbatch compile` does it ahead of time); "
    'XLA\'s "Very slow compile?", which may follow, is not an error'
)


class RunProgress(Output):
    """The display of a run's updates: a line every `log_period` updates, and a bar on a terminal.

    During a long update or compilation the bar counts seconds. Without a terminal, lines do: the
    first after half a minute, later ones after twice the previous pause, at most five minutes. A
    compilation of more than 100 s is explained once, before XLA asks for a bug report.

    Args:
      total_steps, first_step: updates of the whole run, and updates already done.
      log_period: updates per line.
      doing: returns the activity of the run, such as "compiling".
      counted: unit of a batch, such as "pairs"; "": rows.
      total_samples: `samples_seen` at the end, by which the time left follows a ramp of the batch;
        None: by updates.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        first_step: int,
        num_stages: int,
        log_period: int,
        doing: Callable[[], str],
        counted: str = "",
        total_samples: int | None = None,
    ) -> None:
        self._total_samples = total_samples
        self._pace: Pace | None = None  # from the first update on, so that compiling does not count
        self._console, self._total, self._doing = console, total_steps, doing
        self._num_stages, self._log_period = num_stages, log_period
        self._counted = f" {counted}" if counted else ""
        self._bar: Bar | None = None
        self._first_step = self._step = first_step
        self._unprinted = ""
        self._has_explained = False
        self._updated_at = self._printed_at = time.monotonic()
        self._pause_s = LINE_S  # pause after the last line
        self._is_closed = threading.Event()
        if console.is_terminal:
            self._bar = progress_bar(console, Pace(total_steps, first_step))
            self._task = self._bar.add_task(
                self._waiting(0.0), total=total_steps, completed=first_step
            )
            self._bar.start()
        if not console.quiet:
            wait = self._keep_counting if self._bar else self._keep_printing
            threading.Thread(target=wait, name="maxbatch-lines", daemon=True).start()

    def _waiting(self, seconds: float) -> str:
        return f"step {self._step}/{self._total} | {self._doing()}, {seconds:.0f} s"

    def _keep_counting(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            silent_s = time.monotonic() - self._updated_at
            if self._bar is not None and (silent_s >= LINE_S or self._step == self._first_step):
                self._bar.is_waiting = True
                self._bar.update(self._task, description=self._waiting(silent_s))
                self._explain(silent_s)

    def _keep_printing(self) -> None:
        while not self._is_closed.wait(
            max(0.0, self._printed_at + self._pause_s - time.monotonic())
        ):
            now = time.monotonic()
            if now - self._printed_at < self._pause_s:
                continue
            if self._unprinted:
                self._print(self._unprinted)
            else:
                pause_s = min(2 * self._pause_s, _LONGEST_PAUSE * LINE_S)
                self._print(self._waiting(now - self._updated_at))
                self._explain(now - self._updated_at)
                self._pause_s = pause_s

    def _explain(self, silent_s: float) -> None:
        if (
            not self._has_explained
            and silent_s >= _SLOW_COMPILE_S
            and self._doing() == TimePart.COMPILING
        ):
            self._has_explained = True
            self._console.print(folded(_OF_SLOW_COMPILE, 2, self._width))

    @property
    def _width(self) -> int | None:
        return self._console.width if self._console.is_terminal else None

    def _print(self, line: str) -> None:
        self._unprinted, self._printed_at, self._pause_s = "", time.monotonic(), LINE_S
        self._console.print(folded_parts(line.split(" | "), self._width))

    def append(self, record: Record) -> None:
        """Shows a record of `metrics.jsonl`."""
        step, line = record[Metric.STEP], self._line(record)
        left, remarks = self._left(record), list[str]()
        if record[Metric.SKIP_REASON] == SkipReason.NON_FINITE:
            remarks.append(f"skipped: {not_finite(record)} is not finite")
        elif record[Metric.SKIP_REASON] == SkipReason.SPIKE:
            remarks.append("skipped: a spike of the loss or the gradient norm")
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
            remarks.append(f"eval reward {record[Metric.EVAL_REWARD]:.3f}")
        if self._bar is not None:
            self._bar.is_waiting = False
            self._bar.update(self._task, completed=step, description=line)
        self._step, self._updated_at = step, time.monotonic()
        self._unprinted = " | ".join(filter(None, [line, left]))
        if remarks or step % self._log_period == 0 or step in (1, self._total):
            self._print(" | ".join([self._unprinted, *remarks]))

    def _left(self, record: Record) -> str:
        """Returns the time left at the pace since the first update; "" there, at the end, and
        beside the bar's own.
        """
        done, total = record[Metric.STEP], self._total
        if self._total_samples is not None:
            done, total = record[Metric.SAMPLES_SEEN], self._total_samples
        if self._pace is None:
            self._pace = Pace(total, done)
        is_last = record[Metric.STEP] >= self._total
        return "" if is_last or self._bar is not None else self._pace.left(done)

    def _line(self, record: dict[str, object]) -> str:
        reward, mfu = record.get(Metric.REWARD), record[Metric.MFU]
        margin, accuracy = record.get(Metric.MARGIN), record.get(Metric.PAIR_ACCURACY)
        parts = (
            f"step {record[Metric.STEP]}/{self._total}",
            "loss -" if record[Metric.LOSS] is None else f"loss {record[Metric.LOSS]:z.4f}",
            None if reward is None else f"reward {reward:z.3f}",
            None if margin is None else f"margin {margin:z.3f}",
            None if accuracy is None else f"accuracy {accuracy:.0%}",
            f"batch {record[Metric.GLOBAL_BATCH_SIZE]}{self._counted}",
            f"stage {record[Metric.STAGE]}/{self._num_stages - 1}"
            if self._num_stages > 1
            else None,
            f"lr {record[Metric.LEARNING_RATE]:.2e}",
            f"{record[Metric.TOKENS_PER_SECOND]:,.0f} tokens/s",
            None if mfu is None else f"MFU {mfu:.1%}",
        )
        return " | ".join(filter(None, parts))

    def close(self) -> None:
        """Ends the bar and the lines; the last update's line replaces the bar."""
        self._is_closed.set()
        if self._bar is not None:
            self._bar.stop()
            if self._unprinted:
                self._print(self._unprinted)
