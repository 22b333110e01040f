"""Files of datasets, on this machine and in object stores; names may have any character.

A path with a scheme is read through fsspec, which needs the scheme's package. Local paths avoid fsspec: its import
takes as long as numpy's, and its local file system has no times in nanoseconds and follows no symbolic links to
folders.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from stat import S_ISREG
from typing import Any, BinaryIO, NamedTuple, cast

from maxbatch.system.errors import ConfigError
from maxbatch.system.object_stores import file_system
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import scheme_of, url_fault
from maxbatch.system.stores.store import FileSystem

# Fields with an object's version in stores' answers, the most reliable first.
_STAMPS = ("etag", "ETag", "generation", "mtime", "LastModified", "last_modified", "updated", "created")

Matches = Callable[[str], object]  # tests the bare name of a file or folder


class SourceFile(NamedTuple):
    """One file of a dataset."""

    path: str  # absolute, or a URL
    name: str  # its path below the dataset
    size: int  # bytes
    stamp: int | str  # changes with the content: mtime in ns, or the store's version of the object
    marks: tuple[int, ...] = ()  # on a disk: inode, and time of change in ns, which programs cannot set
    content: str = ""  # in a store: its checksum or version of the content


class LocalDisk:
    """Local file systems."""

    is_folder = staticmethod(os.path.isdir)
    exists = staticmethod(os.path.exists)

    def file(self, path: str, name: str) -> SourceFile | None:
        """Describes a regular file; returns None for anything else, raises OSError if nothing is there."""
        status = os.stat(path)
        if not S_ISREG(status.st_mode):
            return None
        return SourceFile(path, name, status.st_size, status.st_mtime_ns, (status.st_ino, status.st_ctime_ns))

    def find(self, folder: str, wanted: Matches, enter: Matches) -> list[SourceFile]:
        """Lists the `wanted` regular files below a folder, in `enter`ed folders, in order of their names."""
        entries = sorted(_entries(os.path.abspath(folder), "", wanted, enter))
        return [file for name, path in entries if (file := self.file(path, name))]

    def glob(self, pattern: str) -> list[SourceFile]:
        """Lists the regular files that a pattern matches, in order."""
        paths = sorted(glob.glob(pattern, recursive=True))
        return [file for path in paths if (file := self.file(os.path.abspath(path), path))]

    def open(self, path: str) -> BinaryIO:
        """Opens a file for reading; remote files are fetched by blocks on demand."""
        return open(path, "rb")

    def local_copy(self, path: str) -> AbstractContextManager[str]:
        """Returns a context with a local path of the file, for readers that need one."""
        return contextlib.nullcontext(path)


def _entries(folder: str, prefix: str, wanted: Matches, enter: Matches) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir()
            if is_folder and enter(entry.name):
                yield from _entries(entry.path, f"{prefix}{entry.name}/", wanted, enter)
            elif not is_folder and wanted(entry.name):
                yield prefix + entry.name, entry.path


class RemoteStore:
    """An object store, with the methods of LocalDisk."""

    def __init__(self, scheme: str, file_system: FileSystem) -> None:
        self._scheme, self._file_system = scheme, file_system

    def _at(self, path: str) -> RemotePath:
        return RemotePath(f"{self._scheme}://{path}")

    def is_folder(self, path: str) -> bool:
        return self._at(path.rstrip("/")).is_dir()

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def file(self, path: str, name: str) -> SourceFile | None:
        return self._file(path, name, self._at(path).ask(self._file_system.info, path))

    def find(self, folder: str, wanted: Matches, enter: Matches) -> list[SourceFile]:
        root = folder.rstrip("/") + "/"
        infos = self._at(folder).ask(self._file_system.find, folder, detail=True)
        found = []
        for path, info in sorted(infos.items()):
            *folders, bare_name = path.removeprefix(root).split("/")
            file = self._file(path, path.removeprefix(root), info)
            if file and wanted(bare_name) and all(map(enter, folders)):
                found.append(file)
        return found

    def glob(self, pattern: str) -> list[SourceFile]:
        infos = self._at(pattern).ask(self._file_system.glob, pattern, detail=True)
        return [file for path, info in sorted(infos.items()) if (file := self._file(path, path, info))]

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._at(path).open("rb"))

    @contextlib.contextmanager
    def local_copy(self, path: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="maxbatch-") as folder:
            copy = os.path.join(folder, "copy")
            self._at(path).ask(self._file_system.get_file, path, copy)
            yield copy

    def _file(self, path: str, name: str, info: dict[str, Any]) -> SourceFile | None:
        if info["type"] != "file":
            return None
        stamp = next((info[field] for field in _STAMPS if info.get(field)), "")
        # Listings and requests for one object give the same time in different types.
        stamp = str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
        url, checksum = self._file_system.unstrip_protocol(path), info.get("md5Hash")
        content = f"{info['size']} {checksum}" if checksum else f"{info['size']} {stamp} {url}"
        return SourceFile(url, name, info["size"], stamp, content=content)


_DISK = LocalDisk()


def storage_of(path: str, where: str = "") -> tuple[LocalDisk | RemoteStore, str]:
    """Returns the storage of an absolute path or a URL, and its path there.

    Messages about a missing package or an unreachable store begin with `where`, by default the path.
    """
    scheme = scheme_of(path)
    if scheme is None:
        return _DISK, path
    where = where or path[:80]
    if rule := url_fault(path, may_hold_pattern=True):
        raise ConfigError(f"{where}: must be {rule}")
    try:
        found = file_system(scheme)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; a copy on a local disk needs none") from error
    return RemoteStore(scheme, found), found._strip_protocol(path)


def typed_reason(error: Exception) -> str:
    """Returns the message of an exception on one line."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(text.split())
