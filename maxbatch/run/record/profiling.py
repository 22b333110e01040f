"""A window of updates under JAX's profiler."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from maxbatch.system.storage.storage import AnyPath, copy_tree, place_here


class Profiler:
    """A trace of a window of updates: `"10:13"` is 10, 11 and 12, `""` none.

    TensorBoard's profile plugin and Perfetto read the trace in `folder`. An object store gets it at
    the end of the window, since the profiler only writes to disks.
    """

    def __init__(self, window: str, folder: AnyPath) -> None:
        first, _, end = window.partition(":")
        self._steps = range(int(first), int(end)) if window else range(0)
        self._folder = folder
        self._writes_to: Path | None = None  # while tracing
        self._stack = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Starts the trace before the first update of the window."""
        if step in self._steps and not self._writes_to:
            self._writes_to = self._stack.enter_context(place_here(self._folder))
            jax.profiler.start_trace(str(self._writes_to))

    def ends_after(self, step: int) -> bool:
        """Returns whether the trace ends after an update, which must then have ended."""
        return self._writes_to is not None and step == self._steps[-1]

    def after(self, step: int) -> None:
        """Ends the trace after the last update of the window."""
        if self.ends_after(step):
            self._end()

    def _end(self) -> None:
        jax.profiler.stop_trace()
        written, self._writes_to = self._writes_to, None
        with self._stack:
            if written:
                copy_tree(written, self._folder)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._writes_to:
            self._end()
