"""The experiment trackers of `log_to` besides TensorBoard: rows of `Table.TRACKERS`.

Each tracked run has its folder's name and the config. A resumed run continues the same tracked run,
by the id in `run_dir/trackers.json`. Trackers have their own threads, so that a hanging tracker
delays neither training nor the end of a run. A failing tracker is dropped with one warning.
"""

from __future__ import annotations

import importlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from maxbatch.config.values import Value
from maxbatch.run.folder.json_file import read_json, write_json
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.run_folder import TRACKERS_FILE, RunFolder
from maxbatch.run.record.recorder import Output
from maxbatch.system.errors import ConfigError, one_line
from maxbatch.system.registry import Table, load

_BEGIN_S, _END_S = 120.0, 30.0  # time limits to begin and to end a tracked run
_LONGEST_PROBLEM = 160
_MOST_WAITING = 10_000  # waiting calls, each with a record


class TrackedRun(NamedTuple):
    """A run in a tracker."""

    run_dir: str
    settings: Mapping[str, bool | int | float | str]  # its config

    @property
    def name(self) -> str:
        """The last parts of its folder's path, which distinguish a sweep's trials."""
        return "/".join(self.run_dir.rstrip("/").split("/")[-2:])


class TrackedOutput(Output):
    """A tracked run's records on their way to its tracker.

    Attributes:
      run_id: the tracker's id of the run.
    """

    run_id: str


@dataclass(frozen=True)
class Tracker:
    """An experiment tracker, a value of `log_to`, which names its package and our extra too.

    Attributes:
      begin: begins a run, or resumes that of an id, with the imported package.
      works: a setting with which it needs no service, for messages.
    """

    begin: Callable[[ModuleType, TrackedRun, str | None], TrackedOutput]
    works: str


def check_loggers(log_to: str) -> None:
    """Imports the packages of `log_to`.

    Raises:
      ConfigError: a package is not installed.
    """
    for name in _names_in(log_to):
        _imported(name)


def open_loggers(
    log_to: str, run: TrackedRun, folder: RunFolder, warn: Callable[[str], None]
) -> list[Output]:
    """Starts or resumes the trackers of `log_to`.

    Raises:
      ConfigError: a tracker cannot be reached or rejects the user.
    """
    file = folder.path / TRACKERS_FILE
    ids: dict[str, str] = (
        read_json(file, "remove it: the trackers then begin a new run", dict) or {}
    )
    loggers: list[Output] = []
    for name in _names_in(log_to):
        worker = _Worker(name)
        logger = _begun(name, log_to, run, ids.get(name), worker)
        ids[name] = logger.run_id
        loggers.append(Guarded(name, logger, worker, warn))
    if loggers:
        write_json(file, ids)
    return loggers


def _begun(
    name: str, log_to: str, run: TrackedRun, run_id: str | None, worker: _Worker
) -> TrackedOutput:
    tracker = load(Table.TRACKERS, name)
    assert isinstance(tracker, Tracker), f"{name} is a tracker"
    package, begun = _imported(name), list[TrackedOutput]()
    worker.call(lambda: begun.append(tracker.begin(package, run, run_id)))
    is_idle = worker.wait(_BEGIN_S)
    if worker.error is None and is_idle:
        return begun[0]

    # The service has no such user, no network, or a wrong address.
    problem = (
        one_line(worker.error, _LONGEST_PROBLEM)
        if worker.error
        else f"no answer within {_BEGIN_S:g} s"
    )
    raise ConfigError(f"log_to={log_to}: {name} cannot be used ({problem}); works: {tracker.works}")


def _names_in(log_to: str) -> list[str]:
    return [name for name in log_to.split(",") if name and name != "tensorboard"]


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"log_to={name}: is not installed; pip install 'maxbatch[{name}]'"
        ) from None


def numbers_of(record: Record) -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a record by name, including each source of a mixture."""
    by_source: Mapping[str, int] = record.get(Metric.SAMPLES_BY_SOURCE, {})
    numbers = record | {
        f"{Metric.SAMPLES_BY_SOURCE}/{name}": count for name, count in by_source.items()
    }
    for name, value in numbers.items():
        if isinstance(value, int | float) and math.isfinite(value) and name != Metric.STEP:
            yield name, value


def settings_of(config: Mapping[str, Value]) -> dict[str, bool | int | float | str]:
    """Returns the config for a tracker, without null keys."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in config.items()
        if value is not None
    }


class _Worker:
    """A thread that makes a tracker's calls in order until one fails; the process does not wait for
    it.
    """

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None  # of the failed call
        self._calls: queue.Queue[tuple[Callable[[], object], bool]] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._work, name=f"maxbatch-{name}", daemon=True).start()

    def call(self, call: Callable[[], object], also_after_failure: bool = False) -> bool:
        """Queues a call; returns False if the queue is full."""
        try:
            self._calls.put_nowait((call, also_after_failure))
        except queue.Full:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Waits up to a bound for all queued calls; returns whether they are done."""
        done = threading.Event()
        return self.call(done.set, also_after_failure=True) and done.wait(seconds)

    def _work(self) -> None:
        while True:
            call, also_after_failure = self._calls.get()
            try:
                if self.error is None or also_after_failure:
                    call()
            except Exception as error:
                self.error = error


class Guarded(Output):
    """A tracker whose failure or silence does not stop training."""

    def __init__(
        self, name: str, logger: Output, worker: _Worker, warn: Callable[[str], None]
    ) -> None:
        self._name, self._logger, self._worker, self._warn = name, logger, worker, warn
        self._is_left_out = False

    def append(self, record: Record) -> None:
        self._hand_on(lambda: self._logger.append(record))

    def sync(self) -> None:
        """Requests sending of pending records, without waiting; `metrics.jsonl` has every
        record.
        """
        self._hand_on(self._logger.sync)

    def close(self) -> None:
        """Ends the tracker's run, waiting at most `_END_S`."""
        self._hand_on(self._logger.close)
        if not self._is_left_out and not self._worker.wait(_END_S):
            self._leave_out(f"did not end within {_END_S:g} s")
        self._check()

    def _hand_on(self, call: Callable[[], None]) -> None:
        self._check()
        if not self._is_left_out and not self._worker.call(call):
            self._leave_out(f"has not answered for {_MOST_WAITING:,} updates")

    def _check(self) -> None:
        if self._worker.error is not None:
            self._leave_out(f"failed ({one_line(self._worker.error, _LONGEST_PROBLEM)})")

    def _leave_out(self, why: str) -> None:
        if not self._is_left_out:
            self._warn(f"{self._name} {why}; the run continues without it")
        self._is_left_out = True
