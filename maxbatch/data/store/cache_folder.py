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

from maxbatch.config.values import shown
from maxbatch.system.atomic_files import writing_atomically
from maxbatch.system.bounded import MOST_BYTES, read_json
from maxbatch.system.errors import writing
from maxbatch.system.storage import user_cache


def cache_folder(data_cache_dir: str, name: str = "tokens") -> Path:
    """Returns a folder (by default of stores) in `data_cache_dir`, else in maxbatch's folder of the user's cache."""
    return (Path(os.path.expanduser(data_cache_dir)) if data_cache_dir else user_cache()) / name


def cache_file(data_cache_dir: str, name: str, facts: object) -> Path:
    """Returns the file in the cache's folder `name` for `facts`, JSON values; its name is their hash."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder(data_cache_dir, name) / digest


def recall(path: Path, most_bytes: int = MOST_BYTES) -> object:
    """Returns the JSON value written by `keep`, never null; None if the file is missing or damaged."""
    try:
        value, checksum = read_json(path, str(path), most_bytes=most_bytes)
    except (OSError, ValueError, TypeError):
        return None
    return value if checksum == _checksum(path, value) else None


def keep(path: Path, value: object) -> None:
    """Writes a JSON value to a cache file; raises OSError on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_atomically(path) as file:
        file.write(json.dumps([value, _checksum(path, value)]).encode())


def _checksum(path: Path, value: object) -> int:
    return zlib.crc32(json.dumps([path.name, value]).encode())


def writing_cache(data_cache_dir: str, path: Path) -> AbstractContextManager[None]:
    """Turns failures to write to the cache into a one-line error."""
    where = f"data_cache_dir={shown(repr(data_cache_dir))}: {path}"
    return writing(where, "data_cache_dir=/a/writable/folder puts it elsewhere")
