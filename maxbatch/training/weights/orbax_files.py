"""Orbax's small files in object stores: what fails for a passing reason is tried again within the house's own bound.

Orbax reaches them through etils.epath, whose clients give up within a minute; arrays go through TensorStore.

TensorStore's threads ask nobody whether the run still holds its lease. So a checkpoint is written into a folder whose
name only this start of the run has, and copied to its own place once it is whole. Whoever takes the lease over removes
such folders first: from then on there is nothing that a writer who was stopped could still copy.
"""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import IO, Any, TypeVar

from etils import epath
from etils.epath import backend, gpath
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath

from maxbatch.runs.position import COMMITTED_FILE, note_steps, recent_steps
from maxbatch.system import fences
from maxbatch.system.errors import StoreRefused
from maxbatch.system.object_stores import gone_is_done, persist
from maxbatch.system.patience import Patience
from maxbatch.system.storage import AnyPath, as_path, clone_tree, remove_tree
from maxbatch.system.stores import STORES

T = TypeVar("T")
AnyText = str | os.PathLike[str]

# Hosts wait for each other while one of them waits for the store: that one is to give up first, and say why.
BARRIER_S = 2 * int(Patience.seconds)
COMMIT_S = 2 * BARRIER_S  # for the whole of a save
_failed_loops: list[asyncio.AbstractEventLoop] = []


def let_orbax_wait_for_stores() -> None:
    """Makes epath's files in object stores, and the hosts of a run, wait for a store that does not answer.

    Epath has no public way to name a backend; it looks them up in this table (etils 1.15). Nor has Orbax one to set how
    long hosts wait for each other while a checkpoint begins (0.12.8).
    """
    for scheme in STORES:
        gpath._PREFIX_TO_BACKEND[scheme] = PatientFiles()
    multihost._DEFAULT_BARRIER_TIMEOUT = BARRIER_S


@functools.cache
def let_failed_arrays_end_quietly() -> None:
    """Makes Orbax print nothing about a save or restore that fails: the error it raises is enough.

    Orbax has no public way to run its coroutines elsewhere (0.12.8).
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    asyncio_utils._run_sync_via_new_loop = _run_on_new_loop


def _run_on_new_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on an event loop of its own. If the coroutine fails, the loop is kept open.

    TensorStore reports every array to the loop. It prints a traceback for each one that finds the loop closed.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(coroutine)
    except BaseException:
        loop.set_exception_handler(lambda _, context: None)  # of tasks that nobody waits for any more
        _failed_loops.append(loop)
        raise
    finally:
        asyncio.set_event_loop(None)
    loop.close()
    return result


def staged_below(folder: AnyPath, token: str) -> type[CommitFileTemporaryPath]:
    """Returns how Orbax saves the steps in a folder: each in a folder with `token` in its name, and copied when whole.

    The file that says that a checkpoint is whole is copied last.
    """

    noted: list[int] = []

    def publish(staging: AnyPath, final: AnyPath) -> None:
        clone_tree(staging, final, last=COMMITTED_FILE)
        before = noted or recent_steps(folder)
        noted[:] = [int(final.name), *(step for step in before if step != int(final.name))]
        note_steps(folder, noted)
        remove_tree(staging)

    class Staged(CommitFileTemporaryPath):
        @classmethod
        def from_final(cls, final_path: epath.Path, **options: Any) -> Staged:
            is_step = os.fspath(final_path.parent) == str(folder)
            name = f"{fences.BUILDING}{token}-{final_path.name}"
            staging = final_path.parent / name if is_step else final_path  # an item of a step is within its folder
            options.pop("snapshot_type", None)
            return cls(staging, final_path, **options)

        async def finalize(self) -> None:
            staging, final = self.get(), self.get_final()
            self._final_path = staging
            await super().finalize()
            self._final_path = final
            if final != staging:
                await asyncio.to_thread(publish, as_path(staging), as_path(final))

    return Staged


class PatientFiles(backend._FileSystemSpecBackend):
    """Epath's files of object stores, whose requests are made again until the patience of the command ends."""

    def open(self, path: AnyText, mode: str) -> IO[Any]:
        there = as_path(path)
        raw = _Written(there) if "w" in mode else io.BytesIO(there.read_bytes())
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def exists(self, path: AnyText) -> bool:
        return as_path(path).exists()

    def isdir(self, path: AnyText) -> bool:
        return as_path(path).is_dir()  # fsspec's own says no where the store does not answer

    def listdir(self, path: AnyText) -> list[str]:
        return _patiently(path, partial(super().listdir, path))

    def glob(self, path: AnyText) -> list[str]:
        return _patiently(path, partial(super().glob, path))

    def stat(self, path: AnyText) -> Any:
        return _patiently(path, partial(super().stat, path))

    def mkdir(self, path: AnyText, *, exist_ok: bool = False, mode: int | None = None) -> None:
        _patiently(path, partial(super().mkdir, path, exist_ok=exist_ok, mode=mode))

    def makedirs(self, path: AnyText, *, exist_ok: bool = False, mode: int | None = None) -> None:
        _patiently(path, partial(super().makedirs, path, exist_ok=exist_ok, mode=mode))

    def rmtree(self, path: AnyText) -> None:
        # Object by object: S3 answers a removal of many by 200 and an error per key, which its client passes over.
        # The file that says that a checkpoint is whole goes first.
        folder = as_path(path)
        (folder / COMMITTED_FILE).unlink(missing_ok=True)
        remove_tree(folder)

    def remove(self, path: AnyText) -> None:
        fences.ask(os.fspath(path))
        _patiently(path, gone_is_done(partial(super().remove, path)))


class _Written(io.BytesIO):
    """A file that is written into an object when it is closed."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._path.write_bytes(content)


def _patiently(path: AnyText, request: Callable[[], T]) -> T:
    """Makes a request until the store answers; Orbax sees a refusal as the client raises it."""
    try:
        return persist(os.fspath(path), request)
    except StoreRefused as refused:
        raise refused.__cause__ or refused from None
