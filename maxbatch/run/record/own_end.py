"""The end of a run through a user's own part: an exception of an output or of rows, raised once all
is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from maxbatch.parallel.hosts import gather
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.record.recorder import Output
from maxbatch.system.code_names import code_name
from maxbatch.system.errors import StopTraining, TrainingError, one_line

T = TypeVar("T")


class OwnEnd:
    """An exception of a user's output or rows, on any host, that ends the run after the updates so
    far are saved.

    Attributes:
      error: the first exception on this host; None if there is none.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._is_watched = False
        # host, message, whether it is `StopTraining`
        self._elsewhere: tuple[int, str, bool] | None = None

    def watch(self, has_parts: bool) -> None:
        """Starts to watch if any host has parts that may raise; all hosts call it together."""
        self._is_watched = any(gather(has_parts))

    def keep(self, error: Exception, part: str = "") -> None:
        """Keeps the first exception; a note names the part, unless it has one."""
        if part:
            error.add_note(f"maxbatch: raised by {part}")
        self.error = self.error or error

    def is_reached(self) -> bool:
        """Returns whether a part has raised on any host; all hosts call it before each update."""
        if not self._is_watched:
            return False
        raised = (
            None
            if self.error is None
            else (one_line(self.error), isinstance(self.error, StopTraining))
        )
        for host, told in enumerate(gather(raised)):
            if told and self._elsewhere is None:
                self._elsewhere = (host, *told)
        return self._elsewhere is not None

    def until(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields batches until one of them raises on any host, which ends the run; all hosts
        iterate together.
        """
        while True:
            batch = None
            try:
                batch = next(batches, None)
            except Exception as error:
                self.keep(error)
            if self.is_reached() or batch is None:
                return
            yield batch

    @property
    def was_reached(self) -> bool:
        """Whether a part had raised on any host when they last compared."""
        return self._elsewhere is not None

    def settle(self, fate: str) -> str | None:
        """Raises the exception once the run is saved; returns the name of a stop on request, None
        without an end.

        All hosts call it together.

        Args:
          fate: the saved state, named for a second note.

        Raises:
          Exception: the exception of a part on this host.
          TrainingError: a part raised on another host.
        """
        self.is_reached()  # an output may have raised after the last update
        if self.error is not None and not isinstance(self.error, StopTraining):
            self.error.add_note(f"maxbatch: {fate}")
            raise self.error
        if self._elsewhere is not None and not self._elsewhere[2]:
            host, message, _ = self._elsewhere
            raise TrainingError(f"host {host}: {message}; {fate}")
        return StopTraining.__name__ if self.error or self._elsewhere else None


class OwnOutput(Output):
    """A user's output; it receives no record after its first exception, which ends the run."""

    def __init__(self, output: Output, place: int, end: OwnEnd) -> None:
        self._output, self._end = output, end
        self._name = f"outputs[{place}], {getattr(output, 'name', None) or code_name(output)}"
        self._has_raised = False
        self._step: object = None

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._has_raised:
            return
        try:
            call()
        except Exception as error:
            self._has_raised = True
            after = "" if self._step is None else f", given the record of step {self._step}"
            self._end.keep(error, f"{self._name}{after}")

    def append(self, record: Record) -> None:
        self._step = record[Metric.STEP]
        self._guarded(lambda: self._output.append(record))

    def sync(self) -> None:
        self._guarded(self._output.sync)

    def close(self) -> None:
        try:
            self._output.close()
        except Exception as error:
            error.add_note(f"maxbatch: raised by {self._name}, on closing")
            raise


class OwnFeed(Generic[T]):
    """The batches of a user's stream; they end at an exception, which ends the run.

    The first batch is read at once, so that rows that cannot be used are refused before anything is
    compiled.

    Raises:
      Exception: of the first batch.
    """

    def __init__(self, batches: Iterator[T], end: OwnEnd) -> None:
        self._batches, self._end = batches, end
        self._first = list(itertools.islice(batches, 1))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._first:
            return self._first.pop()
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._end.keep(error)
            raise StopIteration from None
