"""Orbax for checkpoints: arrays on disk and in object stores, and the causes of its errors.

Orbax's small files in object stores go through etils.epath, whose clients give up within a minute; here their requests
are retried within the command's patience. Arrays go through TensorStore.

TensorStore's threads do not check the run's lease. So a checkpoint is first written to a folder unique to this start of
the run, and copied into place when whole. The next holder of the lease first removes such folders, so that a suspended
writer has nothing left to copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import logging
import os
import re
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from etils.epath import backend, gpath
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath
from orbax.checkpoint._src.serialization import tensorstore_utils

from maxbatch.parallel.hosts import gather
from maxbatch.runs.position import COMMITTED_FILE
from maxbatch.system import fences
from maxbatch.system.errors import StoreRefused, reading
from maxbatch.system.object_stores import gone_is_done, kvstore, persist, refusal
from maxbatch.system.patience import Patience
from maxbatch.system.storage import AnyPath, as_path, clone_tree, is_remote, remove_tree
from maxbatch.system.stores import STORES

T = TypeVar("T")
AnyText = str | os.PathLike[str]

# Hosts wait for each other while one waits for the store; that host should give up first, with the cause.
BARRIER_S = 2 * int(Patience.seconds)
COMMIT_S = 2 * BARRIER_S  # for a whole save
OTHER_ARRAYS = "tree structures do not match"  # Orbax's message if the stored arrays differ from the requested ones
_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a file is missing or of another kind
_failed_loops: list[asyncio.AbstractEventLoop] = []


def arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that writes each shard from one of its replicas.

    Orbax's default, slicing a shard over all replicas, would compile during training.
    """
    let_failed_arrays_end_quietly()
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def restore_as(abstract: object, partial: bool = False) -> ocp.args.PyTreeRestore:
    """Returns Orbax's request for arrays on the shardings of `abstract`; `partial`: there may be others."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)


@functools.cache
def let_orbax_reach_stores() -> None:
    """Teaches Orbax to find every store, and to wait longer for hosts and stores.

    Orbax knows the stores' commit protocol but only passes gs:// to TensorStore. It has no public way to add others, so
    two of its functions are replaced; the same for the hosts' timeout at the start of a checkpoint (0.12.8). Epath has
    no public way to add a backend, so its table is changed (etils 1.15).
    """
    # Orbax has by now reduced two slashes to one after schemes other than gs.
    tensorstore_utils._use_gcs_driver = lambda folder: folder.partition(":/")[0] in STORES
    gcs_utils.get_kvstore_for_gcs = kvstore
    for scheme in STORES:
        gpath._PREFIX_TO_BACKEND[scheme] = PatientFiles()
    multihost._DEFAULT_BARRIER_TIMEOUT = BARRIER_S


@contextlib.contextmanager
def plain_path(folder: AnyPath) -> Iterator[Path]:
    """Yields a path to a folder that Orbax and TensorStore do not misread.

    They take `[` for a pattern, `\\` for a separator and `gs:` for a scheme, wherever it stands in a path; such a
    folder is reached through a link.
    """
    if is_remote(folder):
        let_orbax_reach_stores()
        yield epath.Path(str(folder))
        return
    if not re.search(r"[][*?\\:]", str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as temporary:
        link = Path(temporary, "link")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def os_error(error: Exception, path: AnyPath) -> OSError | None:
    """Returns the system's error behind a failed read or write; None for missing files and bad content.

    TensorStore raises ValueError with the system's error in its text.
    """
    if is_remote(path):
        return refusal(error, str(path))
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, FileNotFoundError):  # Orbax raises it without an errno
        return None
    return error if isinstance(error, OSError) and error.errno not in _DAMAGED else None


def read_arrays(read: Callable[[], T], checkpoint: AnyPath) -> tuple[T | None, str | None]:
    """Reads arrays of a checkpoint; returns them, or None and their damage on one of the hosts.

    Raises:
      ConfigError, TrainingError: the system or the store refuses the read.
    """
    found, damage = None, None
    try:
        found = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # damaged files can raise anything
        if failure := os_error(error, checkpoint):
            with reading(checkpoint):
                raise failure from error
        damage = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    damage = next(filter(None, gather(damage)), None)
    return (None, damage) if damage else (found, None)


@functools.cache
def let_failed_arrays_end_quietly() -> None:
    """Silences Orbax's prints about a failed save or restore; it also raises the error.

    Orbax has no public way to choose the event loop (0.12.8).
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    asyncio_utils._run_sync_via_new_loop = _run_on_new_loop


def _run_on_new_loop(coroutine: Coroutine[object, object, T]) -> T:
    """Runs a coroutine on a new event loop, which stays open if the coroutine fails.

    TensorStore reports every array to the loop, and prints a traceback if the loop is closed.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(coroutine)
    except BaseException:
        loop.set_exception_handler(lambda _, context: None)  # of abandoned tasks
        _failed_loops.append(loop)
        raise
    finally:
        asyncio.set_event_loop(None)
    loop.close()
    return result


def staged_below(folder: AnyPath, token: str) -> type[CommitFileTemporaryPath]:
    """Returns a class with which Orbax saves each step in a folder named with `token`, and copies it when whole.

    The file that marks a whole checkpoint is copied last.
    """

    def publish(staging: AnyPath, final: AnyPath) -> None:
        clone_tree(staging, final, last=COMMITTED_FILE)
        remove_tree(staging)

    class Staged(CommitFileTemporaryPath):
        @classmethod
        def from_final(cls, final_path: epath.Path, **options: object) -> Staged:
            is_step = os.fspath(final_path.parent) == str(folder)
            name = f"{fences.BUILDING}{token}-{final_path.name}"
            staging = final_path.parent / name if is_step else final_path  # an item stays within its step
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
    """Epath's backend for object stores, with requests retried within the command's patience."""

    def open(self, path: AnyText, mode: str) -> IO[Any]:
        there = as_path(path)
        raw = _Written(there) if "w" in mode else io.BytesIO(there.read_bytes())
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def exists(self, path: AnyText) -> bool:
        return as_path(path).exists()

    def isdir(self, path: AnyText) -> bool:
        return as_path(path).is_dir()  # fsspec's own returns False if the store does not answer

    def listdir(self, path: AnyText) -> list[str]:
        return _patiently(path, partial(super().listdir, path))

    def glob(self, path: AnyText) -> list[str]:
        return _patiently(path, partial(super().glob, path))

    def stat(self, path: AnyText) -> object:
        return _patiently(path, partial(super().stat, path))

    def mkdir(self, path: AnyText, *, exist_ok: bool = False, mode: int | None = None) -> None:
        _patiently(path, partial(super().mkdir, path, exist_ok=exist_ok, mode=mode))

    def makedirs(self, path: AnyText, *, exist_ok: bool = False, mode: int | None = None) -> None:
        _patiently(path, partial(super().makedirs, path, exist_ok=exist_ok, mode=mode))

    def rmtree(self, path: AnyText) -> None:
        # One by one: S3 answers a bulk removal with 200 and errors per key, which its client ignores. The file that
        # marks a whole checkpoint goes first.
        folder = as_path(path)
        (folder / COMMITTED_FILE).unlink(missing_ok=True)
        remove_tree(folder)

    def remove(self, path: AnyText) -> None:
        fences.ask(os.fspath(path))
        _patiently(path, gone_is_done(partial(super().remove, path)))


class _Written(io.BytesIO):
    """A file written to an object on close."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._path.write_bytes(content)


def _patiently(path: AnyText, request: Callable[[], T]) -> T:
    """Retries a request until the store answers; Orbax gets refusals as the client raises them."""
    try:
        return persist(os.fspath(path), request)
    except StoreRefused as refused:
        raise refused.__cause__ or refused from None
