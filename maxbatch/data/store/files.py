"""The files that a dataset path names, in a fixed order.

A path is a file, a folder (its files of the expected kind, in order of their names) or a glob;
several are joined by ";", and their files follow one another in that order. Limits: a path cannot
contain ";"; files whose names begin with a dot are not part of a folder.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage.long_lists import LongList
from maxbatch.system.storage.source_files import (
    SourceFile,
    files_below,
    files_matching,
    is_folder,
    is_there,
    local_copy,
    place_of,
    source_file,
    typed_reason,
)
from maxbatch.system.storage.storage import scheme_of

_MOST_SHARDS = 1_000_000  # of a set; a larger number in a name has another meaning
_SHARD = re.compile(r"(.*?)(\d{3,})-of-(\d{3,})(.*)", re.DOTALL)


class Listing(NamedTuple):
    """The files of a dataset, and the names of the shards that a folder or glob lacks
    (`NAME-00001-of-00005`).
    """

    files: LongList[SourceFile]
    missing: tuple[str, ...]


def list_files(key: str, value: str, wanted: re.Pattern[str], kind: str) -> Listing:
    """Lists the files that config[key] = value names; opens none.

    Args:
      wanted: matches the names of the files that count in a folder.
      kind: names the files in messages.
    """
    if not value:
        raise ConfigError(f"{key}='': the dataset needs a file, a folder or a glob")
    paths = [path.strip() for path in value.split(";")]
    if not all(paths):
        works = ";".join(filter(None, paths))
        raise ConfigError(
            f"{key}={shown(repr(value))}: an empty path between two ';'; works: {key}={works!r}"
        )
    listings = [_list_path(f"{key}={shown(repr(path))}", path, wanted, kind) for path in paths]
    if len(listings) == 1:
        return listings[0]
    files, missing = zip(*listings, strict=True)
    return Listing(LongList(itertools.chain(*files)), tuple(itertools.chain(*missing)))


def _list_path(where: str, path: str, wanted: re.Pattern[str], kind: str) -> Listing:
    remote = scheme_of(path) is not None
    place = place_of(path if remote else os.path.expanduser(path), where)
    is_single, files = False, LongList[SourceFile]()
    try:
        if is_folder(place):
            files = files_below(
                place, lambda name: _is_visible(name) and wanted.search(name), _is_visible
            )
            problem = f"the folder holds no {kind} file"
        elif is_there(place):
            is_single = True
            file = source_file(
                Path(os.path.abspath(place)) if isinstance(place, Path) else place, place.name
            )
            files, problem = LongList([file] if file else []), "not a regular file"
        elif glob.has_magic(str(place)):
            files, problem = files_matching(place), "the glob matches no file"
        else:
            problem = "no such file or folder" + ("" if remote else f" (seen from {os.getcwd()})")
    except TrainingError:  # a store that does not answer
        raise
    # e.g. no permission, no network: each store has exceptions of its own
    except Exception as error:
        unlisted = getattr(error, "filename", None) or "it"
        raise ConfigError(f"{where}: cannot list {unlisted}: {typed_reason(error)}") from error
    if not files:
        raise ConfigError(f"{where}: {problem}")
    return Listing(files, () if is_single else tuple(_missing_shards(file.name for file in files)))


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yields the names that sets of shards `NAME-00000-of-00005` lack."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard and len(shard[2]) == len(shard[3]) and int(shard[3]) <= _MOST_SHARDS:
            sets.setdefault((shard[1], shard[3], shard[4]), set()).add(int(shard[2]))
    for (prefix, total, suffix), present in sets.items():
        for number in range(int(total)):
            if number not in present:
                yield f"{prefix}{number:0{len(total)}}-of-{total}{suffix}"


def open_file(file: SourceFile) -> BinaryIO:
    return cast(BinaryIO, place_of(file.path).open("rb"))


def local_path(file: SourceFile) -> contextlib.AbstractContextManager[str]:
    """Returns a context with the path of the file on this machine, for readers that take nothing
    else.
    """
    return local_copy(place_of(file.path))


def changed(file: SourceFile) -> str | None:
    """Returns the change of a file since it was listed ("changed", "vanished"), or None."""
    try:
        now = source_file(place_of(file.path), file.name)
    except (ConfigError, TrainingError):  # an object store that refuses, or does not answer
        raise
    except OSError:
        return "vanished"
    return None if now == file else "changed"
