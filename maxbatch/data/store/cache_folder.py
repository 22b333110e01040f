"""The cache of tokenised data and derived figures.

Imports nothing slow, so that plans look up the cache quickly.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from maxbatch.config.values import shown
from maxbatch.system.errors import writing
from maxbatch.system.storage.atomic_files import writing_atomically
from maxbatch.system.storage.bounded import MOST_BYTES, read_json
from maxbatch.system.storage.long_lists import LongList, json_parts, read_json_list
from maxbatch.system.storage.storage import user_cache

_PART_BYTES = 1 << 16
_CHECKSUM_BYTES = 16  # at the end of a file, with its brackets and spaces: at most


def cache_folder(data_cache_dir: str, name: str = "tokens") -> Path:
    """Returns a folder (by default of stores) in `data_cache_dir`, else in maxbatch's folder of the
    user's cache.
    """
    return (Path(os.path.expanduser(data_cache_dir)) if data_cache_dir else user_cache()) / name


def cache_file(data_cache_dir: str, name: str, facts: object) -> Path:
    """Returns the file in the cache's folder `name` for `facts`, JSON values and long lists; its
    name is their hash.
    """
    return cache_folder(data_cache_dir, name) / json_hash(facts, sort_keys=True)


def json_hash(value: object, sort_keys: bool = False) -> str:
    """Returns a hash of the JSON of a value that may hold long lists."""
    digest = hashlib.blake2b(digest_size=16)
    for part in json_parts(value, sort_keys):
        digest.update(part)
    return digest.hexdigest()


def recall(path: Path, most_bytes: int = MOST_BYTES) -> object:
    """Returns the JSON value written by `keep`, never null; None if the file is missing or
    damaged.
    """
    try:
        value, checksum = read_json(path, str(path), most_bytes=most_bytes)
    except (OSError, ValueError, TypeError):
        return None
    return value if checksum == _checksum(path, value) else None


def recall_list(path: Path, key: str) -> tuple[LongList[object], dict[str, object]] | None:
    """Returns the object written by `keep` whose first key holds a long list: that list, and the
    other keys.

    Returns None if the file is missing or damaged.
    """
    head = f'[{{"{key}": ['
    try:
        with open(path, "rb") as file:
            if not _agrees(path, file):
                return None
            file.seek(0)
            values, rest = read_json_list(
                iter(lambda: file.read(_PART_BYTES).decode("ascii"), ""), head
            )
        others, _ = json.loads(f"{head}]{rest}")
        return values, {name: value for name, value in others.items() if name != key}
    except (OSError, ValueError, AttributeError):
        return None


def _agrees(path: Path, file: BinaryIO) -> bool:
    """Returns whether the text of a value has the checksum that follows it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _CHECKSUM_BYTES))
    value, _, ending = file.read().rpartition(b", ")
    left, checksum = (
        size - len(ending) - len(b", ") - 1,
        zlib.crc32(json.dumps([path.name]).encode()[:-1] + b", "),
    )
    file.seek(1)
    while part := file.read(min(left, _PART_BYTES)):
        checksum, left = zlib.crc32(part, checksum), left - len(part)
    return bool(value) and ending == b"%d]" % zlib.crc32(b"]", checksum)


def keep(path: Path, value: object) -> None:
    """Writes a JSON value, which may hold long lists, to a cache file; raises OSError on
    failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_atomically(path) as file:
        for part in json_parts([value, _checksum(path, value)]):
            file.write(part)


def _checksum(path: Path, value: object) -> int:
    checksum = 0
    for part in json_parts([path.name, value]):
        checksum = zlib.crc32(part, checksum)
    return checksum


def writing_cache(data_cache_dir: str, path: Path) -> AbstractContextManager[None]:
    """Turns failures to write to the cache into a one-line error."""
    where = f"data_cache_dir={shown(repr(data_cache_dir))}: {path}"
    return writing(where, "data_cache_dir=/a/writable/folder puts it elsewhere")
