"""A window of updates under JAX's profiler."""

from __future__ import annotations

from pathlib import Path

import jax


class Profiler:
    """Traces the updates of a window: `"10:13"` is 10, 11 and 12, `""` none.

    TensorBoard's profile plugin and Perfetto read the trace in `folder`.
    """

    def __init__(self, window: str, folder: Path) -> None:
        first, _, end = window.partition(":")
        self._steps = range(int(first), int(end)) if window else range(0)
        self._folder = folder
        self._tracing = False

    def before(self, step: int) -> None:
        if step in self._steps and not self._tracing:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def ends_after(self, step: int) -> bool:
        return self._tracing and step == self._steps[-1]

    def after(self, step: int) -> None:
        if self.ends_after(step):
            jax.profiler.stop_trace()
            self._tracing = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
