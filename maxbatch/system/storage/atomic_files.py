"""Atomic writes of files and folders; direct writes into devices, pipes and descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from maxbatch.system.errors import writing
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath, file_sizes, remove_tree

_STALE_S = 24 * 3600
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}


@contextlib.contextmanager
def writing_atomically(path: AnyPath) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` when the block ends; an exception discards it.

    An object is uploaded from a temporary file. A link is kept and its target replaced. A device, a
    pipe or a descriptor of this process (`/dev/stdout`) is written into directly.

    Raises:
      OSError: the file cannot be written.
    """
    if isinstance(path, RemotePath):
        with tempfile.NamedTemporaryFile(prefix="maxbatch-") as local:
            yield cast(BinaryIO, local)
            local.flush()
            path.upload(Path(local.name))
        return
    if _takes_bytes(path):
        with _writing_into(path) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    temporary = path.parent / f"{BUILDING}{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def descriptor_of(path: Path) -> int | None:
    """Returns the open descriptor of this process that a path names, or None."""
    name = os.path.abspath(path)
    match = _DESCRIPTOR.fullmatch(name)
    return int(match[1]) if match else _STREAMS.get(name)


def _takes_bytes(path: Path) -> bool:
    """Returns whether a path is written into: a descriptor of this process, a device or a pipe."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return descriptor_of(path) is not None or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _writing_into(path: Path) -> BinaryIO:
    """Opens a device, a pipe or a descriptor for writing; a descriptor continues at its current
    offset.
    """
    number = descriptor_of(path)
    if number is None:
        return open(path, "wb")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fdopen(os.dup(number), "wb")


def write_atomically(path: AnyPath, content: str | bytes) -> None:
    """Writes a file, text as UTF-8.

    Raises:
      ConfigError: the file cannot be written there.
      TrainingError: the disk is full.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    with writing(path), writing_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def writing_folder(
    folder: AnyPath, last: str, replaces: Callable[[str], bool] = lambda name: False
) -> Iterator[AnyPath]:
    """Yields a place for new files, which the folder gets when the block ends; an exception
    discards them.

    The file named `last` marks the folder as complete: it is written last, and an existing one is
    removed first. In an object store the files are written into the folder itself, `last` by the
    end of the block; an object whose name begins with `BUILDING` marks the folder meanwhile.

    Args:
      replaces: whether a file of this name is of an earlier block that was killed, and goes.

    Raises:
      OSError: the folder cannot be written.
    """
    if isinstance(folder, RemotePath):
        with _adding_objects(folder, last, replaces):
            yield folder
        return
    is_new = not folder.exists()
    beside = folder.parent if is_new else folder
    beside.mkdir(parents=True, exist_ok=True)
    building = beside / f"{BUILDING}{secrets.token_hex(8)}"
    building.mkdir()
    try:
        yield building
        if is_new:
            building.rename(folder)
            return
        (folder / last).unlink(missing_ok=True)
        for name in file_sizes(folder):
            if replaces(name):
                (folder / name).unlink(missing_ok=True)
        for file in sorted(building.iterdir(), key=lambda file: file.name == last):
            file.replace(folder / file.name)
    finally:
        remove_tree(building)


@contextlib.contextmanager
def _adding_objects(
    folder: RemotePath, last: str, replaces: Callable[[str], bool]
) -> Iterator[None]:
    """Removes the objects added by the block if it raises; a killed block leaves a mark beside
    them.
    """
    mark = folder / unfinished_mark(last)
    mark.write_text("unfinished: the same command goes on\n")
    (folder / last).unlink(missing_ok=True)
    for name in file_sizes(folder):
        if replaces(name):
            (folder / name).unlink(missing_ok=True)
    before = {path for path, _ in folder.files()} - {mark}
    try:
        yield
        mark.unlink(missing_ok=True)
    except BaseException:
        with contextlib.suppress(Exception):  # the block's error takes precedence
            for path in {path for path, _ in folder.files()} - before:
                path.unlink(missing_ok=True)
        raise


def unfinished_mark(last: str) -> str:
    """Returns the name of the object that marks a store's folder until its file `last` is there."""
    return f"{BUILDING}{last}"


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished files and folders whose writers were killed more than a day ago."""
    for entry in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(FileNotFoundError):
            is_stale = time.time() - entry.stat().st_mtime > _STALE_S
            if is_stale and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif is_stale:
                entry.unlink()
