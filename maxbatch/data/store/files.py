"""The files that a dataset path names, in a fixed order: on this machine, or in a store that fsspec reaches.

A path is a file, a folder (its files of the wanted kind, in order of their names) or a glob; several are joined by
";", and their files follow one another in that order. A path with a scheme (gs://, s3://, ...) is read through
fsspec, which needs the scheme's own package. Limits: ";" cannot be part of a path; a file whose name begins with a
dot is no part of a folder.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from maxbatch.system.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What fsspec needs beside itself; it names the package of any other scheme in its own words.
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
}
# What stores say about the version of an object, the best first.
_STAMPS = ("etag", "ETag", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
_SHARD = re.compile(r"(.*?)(\d{3,})-of-(\d{3,})(.*)", re.DOTALL)


class SourceFile(NamedTuple):
    """One file of a dataset.

    Attributes:
      path: absolute path, or URL.
      name: its path below the dataset.
      size: bytes.
      stamp: what changes when its content does: mtime in ns, or what the store says of its version.
    """

    path: str
    name: str
    size: int
    stamp: int | str


class Listing(NamedTuple):
    """The files of a dataset, and the names of the shards that a folder or glob lacks (`NAME-00001-of-00005`)."""

    files: tuple[SourceFile, ...]
    missing: tuple[str, ...]


def list_files(key: str, value: str, wanted: re.Pattern[str], kind: str) -> Listing:
    """Lists the files that config[key] = value names; opens none.

    Args:
      wanted: matches the names of the files that count in a folder.
      kind: what they are, for messages.

    Raises:
      ConfigError: a path that names nothing, cannot be listed, or needs a package that is not installed.
    """
    if not value:
        raise ConfigError(f"{key}='': the dataset needs a file, a folder or a glob")
    files: list[SourceFile] = []
    missing: list[str] = []
    paths = value.split(";")
    if not all(path.strip() for path in paths):
        works = ";".join(path for path in paths if path.strip())
        raise ConfigError(f"{key}={value!r}: an empty path between two ';'; works: {key}={works!r}")
    for path in paths:
        list_path = _list_remote if is_remote(path) else _list_local
        found, whole_set = list_path(key, path.strip(), wanted, kind)
        files += found
        if whole_set:
            missing += _missing_shards(file.name for file in found)
    return Listing(tuple(files), tuple(missing))


def is_remote(path: str) -> bool:
    """Whether a path has a scheme and is read through fsspec."""
    return _SCHEME.match(path.strip()) is not None


def open_file(file: SourceFile) -> BinaryIO:
    """Opens a file for reading; one that lies elsewhere is fetched block by block as it is read."""
    if is_remote(file.path):
        file_system, path = _file_system("", file.path)
        return file_system.open(path, "rb")
    return open(file.path, "rb")


@contextlib.contextmanager
def local_path(file: SourceFile) -> Iterator[str]:
    """Gives a path on this machine for readers that take nothing else; a remote file is copied for that long."""
    if not is_remote(file.path):
        yield file.path
        return
    file_system, path = _file_system("", file.path)
    with tempfile.TemporaryDirectory(prefix="maxbatch-") as folder:
        copy = os.path.join(folder, "copy")
        file_system.get_file(path, copy)
        yield copy


def changed(file: SourceFile) -> str | None:
    """Returns what has become of a file since it was listed ("changed", "vanished"), or None."""
    try:
        if is_remote(file.path):
            file_system, path = _file_system("", file.path)
            file_system.invalidate_cache()
            info = file_system.info(path)
            now: tuple[int, int | str] = (info["size"], _stamp(info))
        else:
            status = os.stat(file.path)
            now = (status.st_size, status.st_mtime_ns)
    except OSError:
        return "vanished"
    return None if now == (file.size, file.stamp) else "changed"


def walk(root: Path, wanted: Callable[[str], Any], enter: Callable[[str], bool]) -> list[SourceFile]:
    """Returns the regular files below a folder in order of their relative names; the predicates see bare names."""
    found: list[SourceFile] = []
    waiting = [(str(root), "")]
    while waiting:
        folder, prefix = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if enter(entry.name):
                        waiting.append((entry.path, f"{prefix}{entry.name}/"))
                elif wanted(entry.name):
                    found.extend(_regular_file(entry.path, prefix + entry.name))
    return sorted(found, key=lambda file: file.name)


def _list_local(key: str, value: str, wanted: re.Pattern[str], kind: str) -> tuple[list[SourceFile], bool]:
    path = Path(os.path.expanduser(value))
    try:
        if path.is_dir():
            found = walk(
                path, lambda name: name[0] != "." and wanted.search(name), lambda name: name[0] != "."
            )
            problem = f"the folder holds no {kind} file"
        elif path.exists():
            found = list(_regular_file(str(path), path.name))
            problem = "not a regular file"
        elif glob.has_magic(str(path)):
            names = sorted(glob.glob(str(path), recursive=True))
            found = [file for name in names for file in _regular_file(name, name)]
            problem = "the glob matches no file"
        else:
            raise ConfigError(f"{key}={value!r}: no such file or folder (seen from {os.getcwd()})")
    except (OSError, ValueError) as error:
        place = getattr(error, "filename", None) or value
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}={value!r}: cannot list {place}: {reason}") from error
    if not found:
        raise ConfigError(f"{key}={value!r}: {problem}")
    return found, path.is_dir() or not path.exists()


def _regular_file(path: str, name: str) -> Iterator[SourceFile]:
    status = os.stat(path)
    if stat.S_ISREG(status.st_mode):
        yield SourceFile(os.path.abspath(path), name, status.st_size, status.st_mtime_ns)


def _list_remote(key: str, url: str, wanted: re.Pattern[str], kind: str) -> tuple[list[SourceFile], bool]:
    file_system, path = _file_system(key, url)
    try:
        file_system.invalidate_cache()
        if glob.has_magic(path):
            infos, root, problem = file_system.glob(path, detail=True), "", "the glob matches no file"
        elif file_system.isdir(path):
            infos = file_system.find(path, detail=True)
            root, problem = path.rstrip("/") + "/", f"the folder holds no {kind} file"
        elif file_system.exists(path):
            info = file_system.info(path)
            return [_remote_file(file_system, path, path.rsplit("/", 1)[-1], info)], False
        else:
            raise ConfigError(f"{key}={url!r}: no such file or folder")
    except ConfigError:
        raise
    except (
        Exception
    ) as error:  # each store has exceptions of its own: no network, no permission, no such bucket
        raise ConfigError(f"{key}={url!r}: cannot list it: {_in_one_line(error)}") from error
    found = [
        _remote_file(file_system, name, name.removeprefix(root), info)
        for name, info in infos.items()
        if info["type"] == "file" and (not root or _counts(name.removeprefix(root), wanted))
    ]
    if not found:
        raise ConfigError(f"{key}={url!r}: {problem}")
    return sorted(found, key=lambda file: file.name), True


def _counts(name: str, wanted: re.Pattern[str]) -> bool:
    folders_and_name = name.split("/")
    return not any(part.startswith(".") for part in folders_and_name) and bool(
        wanted.search(folders_and_name[-1])
    )


def _remote_file(file_system: Any, path: str, name: str, info: dict[str, Any]) -> SourceFile:
    return SourceFile(file_system.unstrip_protocol(path), name, info["size"], _stamp(info))


def _stamp(info: dict[str, Any]) -> str:
    stamp = next((info[name] for name in _STAMPS if info.get(name)), "")
    # The same moment, as a listing and as a single answer give it.
    return str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)


def _file_system(key: str, url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path there."""
    where = f"{key}={url!r}" if key else url
    scheme = _SCHEME.match(url)
    package = _PACKAGES.get(scheme[1] if scheme else "")
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        needs = (
            f"needs a package that is not installed: pip install {package}"
            if package
            else _in_one_line(error)
        )
        raise ConfigError(f"{where}: {needs}; a copy on a local disk needs none") from error
    except Exception as error:  # e.g. no credentials: an exception of the store's own
        raise ConfigError(f"{where}: cannot be reached: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yields the names that sets of shards `NAME-00000-of-00005` lack."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    widths: dict[tuple[str, str, str], int] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard and len(shard[2]) == len(shard[3]):
            group = (shard[1], shard[3], shard[4])
            sets.setdefault(group, set()).add(int(shard[2]))
            widths[group] = len(shard[2])
    for (prefix, total, suffix), present in sets.items():
        for number in range(int(total)):
            if number not in present:
                yield f"{prefix}{number:0{widths[prefix, total, suffix]}}-of-{total}{suffix}"
