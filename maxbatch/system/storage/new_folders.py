"""New folders, which one process makes and others find whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.atomic_files import unfinished_mark
from maxbatch.system.storage.leases import LEASE_FILE, leased
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath, file_sizes


@contextlib.contextmanager
def holding_new(folder: AnyPath, last: str, why: str, refusal: str) -> Iterator[None]:
    """Holds the path of a new folder during a block that writes it with `writing_folder`.

    In a store, it first removes the objects that such a block has left there when it was killed.

    Args:
      last: the file that `writing_folder` writes last.
      why: ends the refusal of a folder that is there: the rule, and what works.
      refusal: what another process does there, and a remedy.

    Raises:
      ConfigError: there is such a folder, or another process writes it.
    """
    if folder.exists() and not _is_unfinished(folder, last):
        raise ConfigError(f"{folder}: is there already, {why}")
    with leased(folder, refusal):
        if isinstance(folder, RemotePath):
            for file, _ in folder.files():
                if file.name != LEASE_FILE:
                    file.unlink(missing_ok=True)
        yield


def _is_unfinished(folder: AnyPath, last: str) -> bool:
    """Returns whether a folder has nothing but the remains of a block that was killed.

    A folder on a disk appears whole.
    """
    if not isinstance(folder, RemotePath):
        return False
    names = file_sizes(folder).keys()
    return unfinished_mark(last) in names or (names == {LEASE_FILE} and not folder.folders())
