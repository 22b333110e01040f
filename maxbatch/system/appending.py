"""Files that grow by appending; in an object store, by writing them anew.

Objects cannot be appended to. Lines wait in memory and go to the store, with all lines before them, at each `sync` and
every `PERIOD_S`.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import writing
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.repeating import Repeating
from maxbatch.system.storage import AnyPath

PERIOD_S = 25.0


class Appender(Protocol):
    """A file that grows at its end."""

    def append(self, line: bytes) -> None:
        """Adds a line, whole or not at all."""

    def sync(self) -> None:
        """Returns once every line so far is visible to others and survives a crash."""

    def close(self) -> None:
        """Syncs and closes the file."""


def open_appender(path: AnyPath, content: bytes, found: bytes | None = None) -> Appender:
    """Opens a file to append to it.

    Args:
      content: its content before the first line is appended.
      found: its current content, if that may differ. An object is then always written anew, so that a late earlier
        writer has an outdated version.
    """
    if found is not None and (content != found or (found and isinstance(path, RemotePath))):
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
        self._path, self._content = path, bytearray(content)
        self._written = len(content)  # bytes of the object
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._writer = Repeating(self._write, PERIOD_S, "maxbatch-append")

    def append(self, line: bytes) -> None:
        with self._lock:
            self._content += line

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
                content = bytes(self._content)
            if len(content) > self._written:
                self._path.write_bytes(content)
                self._written = len(content)
