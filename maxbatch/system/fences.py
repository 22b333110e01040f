"""Fences: in a folder of an object store only the process that holds its lease can write.

A writer can be suspended anywhere, for longer than its lease lasts, and resume while another process trains in the
folder. So each write of an object states the version that this process wrote last, and asks the holder of the lease
before: another process that has taken the lease over has changed the version, or will write over what came late.
Objects below a folder whose name begins with `BUILDING` have one writer; to write them takes the lease alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from maxbatch.system.object_stores import file_system, persist, version_of, write_if
from maxbatch.system.stores.store import split

BUILDING = ".building-"  # begins the name of whatever is not finished yet
_fences: dict[str, Fence] = {}  # by the URL of the folder


class Fence:
    """The fence of one folder.

    Args:
      folder: its URL.
      ask: raises LeaseLost unless this process holds the lease, as far as it knows by its clocks.
      confirm: raises LeaseLost unless the store confirms now that this process holds the lease.
    """

    def __init__(self, folder: str, ask: Callable[[], None], confirm: Callable[[], None]) -> None:
        self._folder, self.ask, self._confirm = folder, ask, confirm
        self._versions: dict[str, str] = {}  # that this process wrote last, by the URL of the object
        self._locks: dict[str, threading.Lock] = {}
        _fences[folder] = self

    def remove(self) -> None:
        """Lets others of this process write to the folder."""
        if _fences.get(self._folder) is self:
            del _fences[self._folder]

    def write(self, url: str, data: bytes) -> None:
        """Writes an object whole.

        Raises:
          LeaseLost: another process holds the lease; nothing was written.
        """
        if f"/{BUILDING}" in url:
            self.ask()
            persist(url, lambda: file_system(split(url)[0]).pipe_file(url, data))
            return
        with self._locks.setdefault(url, threading.Lock()):
            version = self._versions.get(url) or version_of(url)
            self.ask()
            while (written := write_if(url, data, version)) is None:
                # Either another process holds the lease, or the object was changed late by one that held it before;
                # or the response to our own write was lost.
                self._confirm()
                version = version_of(url)
            self._versions[url] = written


def fence_of(url: str) -> Fence | None:
    """Returns the fence of the innermost folder around an object; None where this process holds no lease."""
    around = [folder for folder in list(_fences) if url.startswith(folder + "/")]
    return _fences.get(max(around, key=len)) if around else None


def ask(url: str) -> None:
    """Raises LeaseLost if another process holds the lease of the folder that an object is in."""
    if fence := fence_of(url):
        fence.ask()
