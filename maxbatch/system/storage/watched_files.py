"""Files that a run reads as long as it lasts, and a check that they are still those that it has
hashed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.contents import content_stamp
from maxbatch.system.storage.storage import AnyPath

CHANGED = (
    "has changed since this start hashed it, so that nothing that depends on it can be saved; put "
    "the former content back, or start again"
)
Stamp = tuple[int, list[int | str]]  # size, and marks that change with every write


class _Watched(NamedTuple):
    file: AnyPath
    stamp: Stamp
    has_same_content: Callable[[], bool]  # reads it again


# the files of each run under way in this process, the innermost last
_RUNS: list[dict[str, _Watched]] = []


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watches the files that are named to `watch` during the block."""
    files: dict[str, _Watched] = {}
    _RUNS.append(files)
    try:
        yield
    finally:
        _RUNS.remove(files)


def watch(file: AnyPath, stamp: Stamp, has_same_content: Callable[[], bool]) -> None:
    """Watches a file until the run under way ends; without a run, does nothing.

    Args:
      stamp: of the file as it was hashed.
      has_same_content: hashes it again, where its stamp differs.
    """
    if _RUNS:
        _RUNS[-1].setdefault(str(file), _Watched(file, stamp, has_same_content))


def check_watched() -> None:
    """Raises ConfigError naming a file of the run under way whose content is no longer what was
    hashed.
    """
    for name, watched in list(_RUNS[-1].items()) if _RUNS else []:
        with reading(watched.file):
            stamp = _stamp(watched.file)
            if stamp == watched.stamp:
                continue
            if not watched.has_same_content():
                raise changed(watched.file)
            _RUNS[-1][name] = watched._replace(stamp=stamp)


def _stamp(file: AnyPath) -> Stamp:
    """Returns the stamp of a file; one that was removed has a stamp of its own, since a map of it
    still has content.
    """
    try:
        return content_stamp(file)
    except FileNotFoundError:
        return 0, []


def changed(file: AnyPath) -> ConfigError:
    """Returns the error about a file whose content changed after it was hashed."""
    return ConfigError(f"{file}: {CHANGED}")
