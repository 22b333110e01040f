"""TensorBoard events of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from maxbatch.runs.metrics_schema import Metric
from maxbatch.system.errors import cannot_write
from maxbatch.training.loggers import numbers_of

_FLUSH_S = 120.0
SHOWN_RESULTS = (Metric.EVAL_LOSS, Metric.LOSS, Metric.TOKENS_PER_SECOND)  # beside the hyperparameters


class Board:
    """Writes the numbers of each record on the thread that records, so that a failed write is raised there.

    Events of updates after `step`, which will be redone, are purged.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        with self._writing():
            self._writer = EventsWriter(str(folder / "events"))
            self._writer.write_event(
                Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
            )
        self._flushed = time.monotonic()

    def append(self, record: dict[str, Any]) -> None:
        """Adds the numbers of a record.

        Raises:
          TrainingError: the disk is full.
        """
        shown = summary.Summary()
        for name, value in numbers_of(record):
            shown.MergeFrom(summary.scalar(name, value))
        self._write(record[Metric.STEP], shown)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.sync()

    def settings(self, settings: Mapping[str, bool | int | float | str]) -> None:
        """Adds hyperparameters, by which TensorBoard compares the runs below a folder, such as a sweep's trials."""
        merged = summary.Summary()
        for part in summary.hparams(dict(settings), dict.fromkeys(SHOWN_RESULTS)):
            merged.MergeFrom(part)
        self._write(0, merged)

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""
        self._write(step, summary.text(name, text))

    def _write(self, step: int, shown: Any) -> None:
        with self._writing():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=shown))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self._folder, error) from None

    def sync(self) -> None:
        """Returns once every event so far is with the system."""
        with self._writing():
            self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        with self._writing():
            self._writer.close()
