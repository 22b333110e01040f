"""Files of datasets, on this machine and in object stores; names may have any character.

Local paths avoid fsspec: its import takes as long as numpy's, and its local file system has no
times in nanoseconds and follows no symbolic links to folders.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.long_lists import LongList, in_order
from maxbatch.system.storage.object_stores import file_system
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath, scheme_of, url_fault
from maxbatch.system.storage.stores.store import split

# Fields with an object's version in stores' answers, the most reliable first.
_STAMPS = (
    "etag",
    "ETag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)

Matches = Callable[[str], object]  # tests the bare name of a file or folder


class SourceFile(NamedTuple):
    """One file of a dataset."""

    path: str  # absolute, or a URL
    name: str  # its path below the dataset
    size: int  # bytes
    stamp: int | str  # changes with the content: mtime in ns, or the store's version of the object
    # on a disk: inode, and time of change in ns, which programs cannot set
    marks: tuple[int, ...] = ()
    content: str = ""  # in a store: its checksum or version of the content


def place_of(path: str, where: str = "") -> AnyPath:
    """Returns the place of an absolute path or a URL, either of which may be a pattern.

    Messages about an invalid URL or a missing package begin with `where`, by default the path.
    """
    scheme = scheme_of(path)
    if scheme is None:
        return Path(path)
    where = where or path[:80]
    if rule := url_fault(path, may_hold_pattern=True):
        raise ConfigError(f"{where}: must be {rule}")
    try:
        file_system(scheme)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; a copy on a local disk needs none") from error
    return RemotePath(path.rstrip("/"))


def is_folder(place: AnyPath) -> bool:
    """Returns whether a folder is there, as far as the system lets us look."""
    return os.path.isdir(place) if isinstance(place, Path) else place.is_dir()


def is_there(place: AnyPath) -> bool:
    """Returns whether anything is there, as far as the system lets us look."""
    return os.path.exists(place) if isinstance(place, Path) else place.exists()


def source_file(path: AnyPath, name: str) -> SourceFile | None:
    """Describes a regular file; returns None for anything else, raises OSError if nothing is
    there.
    """
    if isinstance(path, RemotePath):
        return _object(path, name, path.info())
    status = path.stat()
    if not S_ISREG(status.st_mode):
        return None
    return SourceFile(
        str(path), name, status.st_size, status.st_mtime_ns, (status.st_ino, status.st_ctime_ns)
    )


def files_below(folder: AnyPath, wanted: Matches, enter: Matches) -> LongList[SourceFile]:
    """Lists the `wanted` regular files below a folder, in `enter`ed folders, in order of their
    names.
    """
    if isinstance(folder, Path):
        entries = in_order(_entries(os.path.abspath(folder), "", wanted, enter))
        return LongList(file for name, path in entries if (file := source_file(Path(path), name)))
    files = LongList[SourceFile]()
    for file in _objects(folder, folder.file_system.find):
        below = file.path.removeprefix(f"{folder}/")
        *folders, bare_name = below.split("/")
        if wanted(bare_name) and all(map(enter, folders)):
            files.append(file._replace(name=below))
    return files


def files_matching(pattern: AnyPath) -> LongList[SourceFile]:
    """Lists the regular files that a pattern matches, in order."""
    if isinstance(pattern, RemotePath):
        return LongList(_objects(pattern, pattern.file_system.glob))
    paths = in_order(_matches(str(pattern)))
    return LongList(
        file for path in paths if (file := source_file(Path(os.path.abspath(path)), path))
    )


def _matches(pattern: str) -> Iterator[str]:
    """Yields the paths that a pattern matches, as `glob` does, but without a list of the names in a
    folder.
    """
    folder, name = os.path.split(pattern)
    if name == "**" or folder.startswith("**") or not glob.has_magic(name):
        yield from glob.iglob(pattern, recursive=True)
        return
    wanted = re.compile(fnmatch.translate(name)).match
    for parent in glob.iglob(folder, recursive=True) if glob.has_magic(folder) else [folder]:
        if os.path.isdir(parent or os.curdir):
            with os.scandir(parent or os.curdir) as entries:
                for entry in entries:
                    if wanted(entry.name) and (
                        name.startswith(".") or not entry.name.startswith(".")
                    ):
                        yield os.path.join(parent, entry.name)


@contextlib.contextmanager
def local_copy(path: AnyPath) -> Iterator[str]:
    """Yields a local path of a file, for readers that need one."""
    if isinstance(path, Path):
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as folder:
        copy = os.path.join(folder, "copy")
        path.ask(path.file_system.get_file, path.url, copy)
        yield copy


def _entries(
    folder: str, prefix: str, wanted: Matches, enter: Matches
) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir()
            if is_folder and enter(entry.name):
                yield from _entries(entry.path, f"{prefix}{entry.name}/", wanted, enter)
            elif not is_folder and wanted(entry.name):
                yield prefix + entry.name, entry.path


def _objects(
    place: RemotePath, request: Callable[..., dict[str, dict[str, Any]]]
) -> Iterator[SourceFile]:
    """Yields the objects that a request about a place lists, in order; their names begin with the
    bucket.
    """
    scheme = split(place.url)[0]
    for name, info in sorted(place.ask(request, place.url, detail=True).items()):
        if file := _object(RemotePath(f"{scheme}://{name}"), name, info):
            yield file


def _object(path: RemotePath, name: str, info: dict[str, Any]) -> SourceFile | None:
    if info["type"] != "file":
        return None
    stamp = next((info[field] for field in _STAMPS if info.get(field)), "")
    # Listings and requests for one object give the same time in different types.
    stamp = str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
    checksum = info.get("md5Hash")
    content = f"{info['size']} {checksum}" if checksum else f"{info['size']} {stamp} {path}"
    return SourceFile(path.url, name, info["size"], stamp, content=content)


def typed_reason(error: Exception) -> str:
    """Returns the message of an exception on one line."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(text.split())
