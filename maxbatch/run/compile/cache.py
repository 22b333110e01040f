"""The cache of XLA compilations, and a count of those on the critical path."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxbatch.parallel.jax_internals import replace_damaged_programs, share_cached_cpu_programs
from maxbatch.system.hardware.cpu_devices import cpu_features

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


def use_persistent_cache(cache_dir: str, default: Path) -> None:
    """Keeps compiled programs on disk, so that later starts are faster.

    A user's own JAX cache (`JAX_COMPILATION_CACHE_DIR`) is not changed. All hosts call it.

    Args:
      cache_dir: `compilation_cache_dir`.
      default: the folder, if none is stated.
    """
    is_ours = cache_dir != "none" and not os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if is_ours:
        folder = Path(os.path.expanduser(cache_dir or default))
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        replace_damaged_programs()
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        share_cached_cpu_programs(cpu_features(), has_cache=is_ours)


@contextlib.contextmanager
def without_persistent_cache() -> Iterator[None]:
    """Compiles without the cache, because cached executables do not serialise completely on every
    backend.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        reset_cache()


class CompileCounter:
    """A count of XLA compilations, persistent-cache hits included, on the counter's thread.

    Compilations of other threads are off the critical path. `on_compile` is called with the seconds
    of each.
    """

    def __init__(self, on_compile: Callable[[float], None] = lambda seconds: None) -> None:
        self.count, self._on_compile = 0, on_compile
        self._thread = threading.get_ident()

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _BACKEND_COMPILE and threading.get_ident() == self._thread:
            self.count += 1
            self._on_compile(duration_secs)

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
