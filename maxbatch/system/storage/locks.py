"""Locks on files. The system frees a lock when the last process with the file open ends, even by
kill -9.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_POLL_S = 0.1


def take_lock(path: Path, wait_s: float = 0.0) -> BinaryIO | None:
    """Locks a file, creating it if needed.

    Returns:
      The open file; closing it frees the lock, and a child that inherits it holds the lock too.
      None if another process still holds the lock after `wait_s` seconds.

    Raises:
      OSError: the file cannot be opened, or its file system has no locks.
    """
    end = time.monotonic() + wait_s
    file = open(path, "wb")  # noqa: SIM115  held by the caller
    while not _try_to_lock(file):
        if time.monotonic() >= end:
            file.close()
            return None
        time.sleep(_POLL_S)
    return file


def _try_to_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        file.close()
        raise
    return True


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Waits for the lock on a file, holds it during the block, and removes the file afterwards.

    On a file system without locks the block runs unlocked, so its work must be safe to repeat.
    """
    try:
        file = _lock_at(path)
    except OSError:
        yield
        return
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_at(path: Path) -> BinaryIO:
    while True:
        file = take_lock(path, math.inf)
        assert file is not None, "waits for ever"
        if is_lock_on(file, path):
            return file
        file.close()


def is_lock_on(file: BinaryIO, path: Path) -> bool:
    """Returns whether a locked file is still at a path; a lock on a removed file protects
    nothing.
    """
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False
