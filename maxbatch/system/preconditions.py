"""Reads and writes of objects that depend on their version, or are checked; fsspec knows no more than "create"."""

from __future__ import annotations

from typing import Any

from maxbatch.system.stores import store_of
from maxbatch.system.stores.store import has_lost, split


def read(files: Any, url: str, most: int) -> tuple[bytes, str]:
    """Returns the first `most` bytes of an object, and its version."""
    return store_of(url).read(files, *split(url)[1:], most)


def read_whole(files: Any, url: str) -> bytes:
    """Returns the content of an object, by one request, checked against what the store states of it.

    Raises:
      ConnectionError: another content came than the store holds; it may come whole the next time.
    """
    content, stated, found = store_of(url).read_checked(files, *split(url)[1:])
    if stated != found:
        raise ConnectionError(f"{len(content)} bytes came, which are not the whole object")
    return content


def version(files: Any, url: str) -> str | None:
    """Returns the version of an object, None if there is none."""
    try:
        return store_of(url).version(files, *split(url)[1:])
    except FileNotFoundError:
        return None


def write(files: Any, url: str, data: bytes, version: str | None) -> str | None:
    """Writes an object that has a version, or that is not there (None); returns its new version, None if it lost."""
    try:
        return store_of(url).write(files, *split(url)[1:], data, version)
    except FileNotFoundError:
        if version is None:
            raise  # there is no bucket
        return None
    except Exception as error:
        if has_lost(error):
            return None
        raise


def remove(files: Any, url: str, version: str) -> bool:
    """Removes an object that has a version; returns whether it did."""
    try:
        return store_of(url).remove(files, *split(url)[1:], version)
    except FileNotFoundError:
        return False
    except Exception as error:
        if has_lost(error):
            return False
        raise
