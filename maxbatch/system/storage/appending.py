"""Files that grow by appending; in an object store, by joining parts.

Objects cannot be appended to. Lines wait in memory and go to the store every `PERIOD_S` and at each
`sync`: a small object is written anew, a large one is joined with the new lines inside the store,
so the bytes sent do not grow with the file.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

from maxbatch.system.errors import TrainingError, writing
from maxbatch.system.processes.repeating import Repeating
from maxbatch.system.storage import fences, object_stores
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath

PERIOD_S = 25.0
# an object up to this size is written anew; S3 joins parts of 5 MiB at least
REWRITTEN_BYTES = 16 << 20


class Appender(Protocol):
    """A file that grows at its end."""

    def append(self, line: bytes) -> None:
        """Adds a line, whole or not at all."""

    def sync(self) -> None:
        """Returns once every line so far is visible to others and survives a crash."""

    def close(self) -> None:
        """Syncs and closes the file."""


def open_appender(path: AnyPath, content: bytes, old_content: bytes | None = None) -> Appender:
    """Opens a file to append to it.

    Args:
      content: its content before the first line is appended.
      old_content: its current content, if that may differ. An object is then always written anew, so that
        a late earlier writer has an outdated version.
    """
    if old_content is not None and (
        content != old_content or (old_content and isinstance(path, RemotePath))
    ):
        write_atomically(path, content)
    return _Object(path, content) if isinstance(path, RemotePath) else _File(path)


class _File:
    def __init__(self, path: AnyPath) -> None:
        self._path = path
        with writing(path):
            self._file = open(str(path), "ab", buffering=0)  # noqa: SIM115  closed by close()

    def append(self, line: bytes) -> None:
        end = self._file.tell()
        with writing(self._path):
            try:
                written = self._file.write(line)
                while written < len(line):  # the disk is nearly full: the rest fits, or raises
                    written += self._file.write(line[written:])
            except OSError:
                self._file.truncate(end)
                raise

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Object:
    def __init__(self, path: RemotePath, content: bytes) -> None:
        self._path = path
        self._size = len(content)  # of the object
        # until it is too large
        self._head: bytes | None = content if len(content) <= REWRITTEN_BYTES else None
        self._new = bytearray()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._writer = Repeating(self._write, PERIOD_S, "maxbatch-append")

    def append(self, line: bytes) -> None:
        with self._lock:
            self._new += line

    def sync(self) -> None:
        self._write()
        self._writer.check()

    def close(self) -> None:
        self._writer.stop()
        if not self._writer.has_failed:
            self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                lines = bytes(self._new)
            if not lines:
                return
            if self._head is not None:
                whole = self._head + lines
                self._path.write_bytes(whole)
                self._head = whole if len(whole) <= REWRITTEN_BYTES else None
            else:
                _join(self._path, self._size, lines)
            self._size += len(lines)
            with self._lock:
                del self._new[: len(lines)]


def _join(path: RemotePath, size: int, data: bytes) -> None:
    """Adds bytes to the end of an object of `size` bytes, atomically for readers.

    A retry after a lost response adds nothing twice: the object's size shows whether the join
    happened. The object is changed only if its version is unchanged.

    Raises:
      LeaseLost: another process holds the lease of the folder.
      TrainingError: another process has written the object.
    """

    def add() -> None:
        version, current_size = object_stores.version_of(path.url), path.stat().st_size
        if current_size == size + len(data):
            return
        fences.ask(path.url)
        if current_size != size or version is None:
            raise TrainingError(f"{path}: another process has written to it; this one stops")
        if not object_stores.join(path.url, version, size, data):
            raise ConnectionError("it was changed meanwhile")  # retried with a new look

    path.ask(add)
