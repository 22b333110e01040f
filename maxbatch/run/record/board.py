"""TensorBoard events of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.record.loggers import numbers_of
from maxbatch.system.errors import ConfigError, StoreFull, TrainingError, reason
from maxbatch.system.processes.hidden_modules import hidden
from maxbatch.system.storage.storage import AnyPath, place_here, send

# tensorboardX spends half a second on importing installed store clients, and two on torch; here it
# only writes numbers to local files.
with hidden("boto3", "google.cloud.storage", "torch"):
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

_FLUSH_S = 120.0
_UPLOADED_BYTES = 4 << 20  # about the most per upload
# shown beside hyperparameters
SHOWN_RESULTS = (Metric.EVAL_LOSS, Metric.LOSS, Metric.TOKENS_PER_SECOND)


class Board:
    """TensorBoard events, written on the recording thread.

    Events of updates after `step`, which will be redone, are purged. A full disk or another failed
    write ends the events; training continues, since `metrics.jsonl` has the same numbers. `warn` is
    called when it does continue, because a disk that is full for everything ends the run with its
    own message. A failure of an object store is raised.
    """

    def __init__(self, folder: AnyPath, step: int, warn: Callable[[str], None]) -> None:
        self._folder, self._files, self._warn = folder, 0, warn
        self._problem: str | None = None  # reason why the events ended, until reported
        self._writer: EventsWriter | None = None
        self._has_new = False  # whether events have been added since the last sync
        self._stack = contextlib.ExitStack()
        # Objects cannot grow, so events go to a local file, which is copied to the store.
        self._here = self._stack.enter_context(place_here(folder))
        self._open()
        self._add(
            Event(
                wall_time=time.time(),
                step=step + 1,
                session_log=SessionLog(status=SessionLog.START),
            )
        )
        self._flushed = time.monotonic()

    def _open(self) -> None:
        with self._writing():
            self._writer = EventsWriter(
                str(self._here / "events"), f".{self._files}" if self._files else ""
            )
        self._files += 1

    def append(self, record: Record) -> None:
        self._say_what_ended()
        shown = summary.Summary()
        for name, value in numbers_of(record):
            shown.MergeFrom(summary.scalar(name, value))
        self._write(record[Metric.STEP], shown)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.sync()

    def settings(self, settings: Mapping[str, bool | int | float | str]) -> None:
        """Adds hyperparameters, for TensorBoard's comparison of runs, such as a sweep's trials."""
        merged = summary.Summary()
        for part in summary.hparams(dict(settings), dict.fromkeys(SHOWN_RESULTS)):
            merged.MergeFrom(part)
        self._write(0, merged)

    def text(self, step: int, name: str, text: str) -> None:
        self._write(step, summary.text(name, text))

    def _write(self, step: int, shown: summary.Summary) -> None:
        self._add(Event(wall_time=time.time(), step=step, summary=shown))

    def _add(self, event: Event) -> None:
        with self._writing():
            if self._writer:
                self._writer.write_event(event)
                self._has_new = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, ConfigError | TrainingError) and not isinstance(error, StoreFull):
                raise
            self._give_up(reason(error))

    def _say_what_ended(self) -> None:
        why, self._problem = self._problem, None
        if why:
            problem = f"TensorBoard's events cannot be written ({why})"
            self._warn(f"{self._folder}: {problem}; the run continues without them")

    def _give_up(self, why: str) -> None:
        self._problem = why
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):  # its buffer cannot be written either
            if writer:
                writer.close()

    def sync(self) -> None:
        """Flushes every event so far; writes nothing where none is new."""
        if self._has_new:
            with self._writing():
                if self._writer:
                    self._writer.flush()
                self._upload()
        self._has_new, self._flushed = False, time.monotonic()

    def _upload(self) -> None:
        """Uploads the events so far to an object store; starts a new file after a large one."""
        if self._writer is None:
            return
        newest = Path(self._writer._file_name)
        if send(newest, self._folder / newest.name) and newest.stat().st_size > _UPLOADED_BYTES:
            self._writer.close()
            self._open()

    def close(self) -> None:
        with self._stack:
            try:
                self.sync()
            finally:
                self._close_file()
                if sys.exception() is None:
                    self._say_what_ended()

    def _close_file(self) -> None:
        with self._writing():
            if self._writer:
                self._writer.close()
