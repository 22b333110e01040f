"""Logs of a run, one line per update: appended while it trains, checked when it resumes."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import ClassVar

from maxbatch.run.folder.metrics import (
    LONGEST_RECORD,
    LONGEST_TEXTS,
    METRICS_FILE,
    Record,
    line_digest,
    parse_line,
    read_lines,
    upto,
    wrong_field,
)
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.system.storage.appending import open_appender


class StepLog:
    """A file of JSON lines that each belong to an update.

    Opening it drops the lines after `step`, whose updates are trained again, and lines that cannot
    be read.

    Attributes:
      last_digest: `line_digest` of the last appended line; None before the first.
    """

    longest_line: ClassVar[int] = LONGEST_TEXTS  # bytes; longer ones are dropped

    def __init__(self, folder: RunFolder, name: str, step: int) -> None:
        self._path = folder.path / name
        self.last_digest: str | None = None
        old = read_lines(self._path, self.longest_line)
        kept = self._kept(old, step)
        self._file = open_appender(self._path, b"".join(kept), old_content=b"".join(old))

    def _kept(self, lines: list[bytes], step: int) -> list[bytes]:
        return upto(lines, step)

    def append(self, record: Mapping[str, object]) -> None:
        """Adds a line, whole or not at all; a number that is not finite becomes null."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._file.append(line)
        self.last_digest = line_digest(line)

    def sync(self) -> None:
        """Waits until every line so far is on disk, or in the store."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class MetricsLog(StepLog):
    """`metrics.jsonl` of a run: its lines have the steps 1, 2, 3, ..., each once.

    After `taken_over` updates of another trainer they begin with the next one.

    Lines must not contradict `samples_seen`, the position after `step`; `warn` is called once with
    those that do.
    """

    longest_line: ClassVar[int] = LONGEST_RECORD

    def __init__(
        self,
        folder: RunFolder,
        step: int,
        samples_seen: int,
        warn: Callable[[str], None],
        taken_over: int = 0,
    ) -> None:
        self._samples_seen, self._warn = samples_seen, warn
        self._taken_over = taken_over
        super().__init__(folder, METRICS_FILE, step)

    def _kept(self, lines: list[bytes], step: int) -> list[bytes]:
        by_step: dict[int, list[tuple[bytes, Record]]] = defaultdict(list)
        for line in lines:
            record = parse_line(line)
            if record and not wrong_field(record):
                by_step[record["step"]].append((line, record))

        # sure: steps with one sound line and no other; before: the last line kept
        kept, sure, before = [], set(), {"step": 0, "samples_seen": 0}
        start = 1 + self._taken_over
        for number in sorted(number for number in by_step if start <= number <= step):
            sound = [entry for entry in by_step[number] if self._agrees(entry[1], before, step)]
            if len(sound) == len(by_step[number]) == 1:
                sure.add(number)
            if sound:
                line, before = sound[0]
                kept.append(line)

        if num_holes := max(0, step + 1 - start) - len(sure):
            holes = itertools.islice(
                (number for number in range(start, step + 1) if number not in sure), 5
            )
            steps = ", ".join(map(str, holes)) + (
                f" and {num_holes - 5} more" if num_holes > 5 else ""
            )
            self._warn(
                f"{self._path}: lines are missing, unreadable, doubled or contradict others (step "
                f"{steps}); the run continues without them"
            )
        return kept

    def _agrees(self, record: Mapping[str, int], before: Mapping[str, int], last: int) -> bool:
        """Returns whether a line fits the one before it and the position of the run."""
        seen, growth = record["samples_seen"], record["samples_seen"] - before["samples_seen"]
        if (
            growth < 0
            or seen > self._samples_seen
            or (record["step"] == last and seen < self._samples_seen)
        ):
            return False
        # An update of pre-training uses up its batch; one of reinforcement learning may leave the
        # batch unfinished.
        is_next = record["step"] == before["step"] + 1 and Metric.REWARD not in record
        return not (is_next and growth and record["global_batch_size"] % growth)
