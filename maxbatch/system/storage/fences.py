"""Fences: only the holder of a folder's lease can write to it in an object store.

A writer can be suspended anywhere, for longer than its lease, and resume while another process
trains in the folder. So each write checks the lease first, and requires the version that this
process wrote last: a process that took over the lease has changed the version, or will overwrite
the late object. Objects below a folder whose name begins with `BUILDING` have a single writer; they
need only the lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from maxbatch.system.storage.object_stores import version_of

BUILDING = ".building-"  # prefix of unfinished folders
_FENCES: dict[str, Fence] = {}  # by folder URL


class Fence:
    """The fence of one folder.

    Args:
      ask: raises LeaseLost unless this process holds the lease by its own clocks.
      confirm: raises LeaseLost unless the store confirms now that this process holds the lease.
    """

    def __init__(self, folder: str, ask: Callable[[], None], confirm: Callable[[], None]) -> None:
        self._folder, self.ask, self._confirm = folder, ask, confirm
        self._versions: dict[str, str] = {}  # last written by this process, by object URL
        self._locks: dict[str, threading.Lock] = {}
        _FENCES[folder] = self

    def remove(self) -> None:
        """Removes the fence, so that this process writes to the folder freely."""
        if _FENCES.get(self._folder) is self:
            del _FENCES[self._folder]

    def write(self, url: str, write_if: Callable[[str | None], str | None]) -> None:
        """Writes an object whole.

        Args:
          write_if: writes it if it has the given version, or is not there (None); returns its new
            version, or None.

        Raises:
          LeaseLost: another process holds the lease; nothing was written.
        """
        with self._locks.setdefault(url, threading.Lock()):
            version = self._versions.get(url) or version_of(url)
            self.ask()
            while (written := write_if(version)) is None:
                # Another process holds the lease, or an earlier holder changed the object late, or
                # the response to our own write was lost.
                self._confirm()
                version = version_of(url)
            self._versions[url] = written


def fence_of(url: str) -> Fence | None:
    """Returns the fence of the innermost leased folder around an object; None if there is none."""
    around = [folder for folder in list(_FENCES) if url.startswith(folder + "/")]
    return _FENCES.get(max(around, key=len)) if around else None


def ask(url: str) -> None:
    """Raises LeaseLost if another process holds the lease of an object's folder."""
    if fence := fence_of(url):
        fence.ask()
