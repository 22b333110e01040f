"""Runs that a fresh trainer resumes from a saved state, in this process or in a new one."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxbatch.around.auditing.trainer import Batch, Layout, Make, Refused, Run, Saved, Subject
from maxbatch.system.errors import ConfigError
from maxbatch.system.processes.worker_pool import WorkerEnded, WorkerPool

ImportMake = Callable[[], Make]  # pickled, and called in a new process

# set in a new process, where an audit in the user's module must not start again
_WITHIN = "AUDIT_RESUMES_A_TRAINER"


class NoProcess(Exception):
    """A new process cannot train with this trainer; the message is one line."""


class _Rest(NamedTuple):
    """The part of a run after the saved state."""

    layout: Layout
    saved: Saved
    batches: Sequence[Batch]


def resumed_here(
    subject: Subject, layout: Layout, batches: Sequence[Batch], save_after: int
) -> Run:
    """Returns a run that a fresh trainer continues after `save_after` updates.

    In between, the first trainer continues, and another one trains for another number of updates.
    So counts and generators outside of the saved state do not continue by accident.

    Raises:
      Refused: the trainer raised an exception; Unsaved if the state can neither be pickled nor
        copied.
      ConfigError: the trainer cannot be used.
    """
    begun, saved = subject.run_and_save(layout, batches[:save_after])
    subject.run_and_save(layout, batches[: int(save_after != 1)])
    return begun.then(subject.resume(layout, saved, batches[save_after:]))


def resumed_elsewhere(
    subject: Subject,
    import_make: ImportMake | None,
    layout: Layout,
    batches: Sequence[Batch],
    save_after: int,
) -> Run:
    """Returns a run that a new process continues after `save_after` updates.

    Args:
      import_make: returns its `make` there; None: by the name of its module.
      save_after: updates before the state is saved.

    Raises:
      Refused, ConfigError: as `resumed_here`.
      NoProcess: a new process cannot train with this trainer, not even from the first update on.
    """
    begun, saved = subject.run_and_save(layout, batches[:save_after])
    if saved.problem:
        raise NoProcess(saved.problem)
    try:
        if os.environ.get(_WITHIN):
            raise NoProcess("this process has been made by an audit")
        with WorkerPool(
            functools.partial(_resuming, import_make or by_name(subject.make), sys.path),
            1,
            variables={_WITHIN: "1"},
        ) as pool:
            pool.wait_for_setup()
            (answer,) = pool.submit([_Rest(layout, saved, batches[save_after:])])
            return begun.then(answer.result())
    except (Refused, ConfigError, NoProcess):
        raise
    except WorkerEnded as error:
        raise NoProcess(str(error)) from error
    except Exception as error:  # of pickling, or of importing there
        raise NoProcess(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def by_name(make: Make) -> ImportMake:
    """Returns an import of a `make` that pickle finds by the name of its module.

    Raises:
      NoProcess: pickle does not find it, for example because another function made it.
    """
    try:
        return functools.partial(pickle.loads, pickle.dumps(make))
    except Exception as error:
        raise NoProcess(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _resuming(import_make: ImportMake, path: list[str]) -> Callable[[_Rest], Run]:
    sys.path[:] = path
    return functools.partial(_resume, import_make())


def _resume(make: Make, rest: _Rest) -> Run:
    subject = Subject(make)
    try:
        return subject.resume(*rest)
    except Refused:
        try:
            subject.run(rest.layout, rest.batches[:1])
        except Refused as error:
            raise NoProcess(str(error)) from None
        raise
