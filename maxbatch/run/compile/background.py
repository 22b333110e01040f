"""Compilation on demand, and a thread that compiles ahead of training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from maxbatch.run.compile.compiler import NO_OPTIONS, compile_program

T = TypeVar("T")
# (name, function that lowers the program) -> the compiled program
MakeExecutable = Callable[[str, Callable[[], jax.stages.Lowered]], jax.stages.Compiled]


def compile_here(
    name: str, lower: Callable[[], jax.stages.Lowered], options: Mapping[str, str] = NO_OPTIONS
) -> jax.stages.Compiled:
    """Compiles a program on the calling thread with `program_options`; the default
    `MakeExecutable`.
    """
    return compile_program(lower(), options)


class Background:
    """A thread that compiles ahead of training, at a lower priority.

    `check` raises a job's failure, which fails the run. Leaving the context drops jobs that have
    not begun.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "maxbatch-compile", initializer=_give_way)
        self._jobs: list[Future[Any]] = []

    def start(self, job: Callable[[], T]) -> Future[T]:
        """Adds a job to the thread's queue."""
        submitted = self._pool.submit(job)
        self._jobs.append(submitted)
        return submitted

    def check(self) -> None:
        """Raises the exception of a failed job."""
        for job in self._jobs:
            if job.done():
                job.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _give_way() -> None:
    """Lowers the priority of the calling thread; only Linux has priorities per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
