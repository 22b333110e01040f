"""Hashes of file contents by blocks, so that threads and hosts can share the work."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from maxbatch.system.processes.threads import each_in_threads
from maxbatch.system.storage.remote_path import Status
from maxbatch.system.storage.storage import AnyPath, is_remote, read_range

BLOCK_BYTES = 8 << 20
_READ_BYTES = 256 << 10  # of a file of this machine, which each thread holds in memory
_DIGEST_BYTES = 16
_MOST_THREADS = 16


def content_stamp(file: AnyPath) -> tuple[int, list[int | str]]:
    """Returns the size of a file, and marks that change with every write and replacement, even if
    size and time of writing are kept.

    On a disk these are inode, time of change and time of writing; in a store, the version.
    """
    status = file.stat()
    if isinstance(status, Status):
        return status.st_size, [status.version or str(status.st_mtime)]
    return status.st_size, [status.st_ino, status.st_ctime_ns, status.st_mtime_ns]


def stored_sum(file: AnyPath) -> str:
    """Returns a store's MD5 of an object, or else its version; "" for a file on disk."""
    status = file.stat()
    return (status.md5 or f"{status.version} {file}") if isinstance(status, Status) else ""


def md5_of(
    file: AnyPath, size: int | None = None, progress: Callable[[int], None] = lambda _: None
) -> str:
    """Returns the MD5 of a file in the form that stores use.

    Args:
      size: the bytes to read; all by default.
      progress: called with the bytes of each piece that was read.
    """
    digest, left = hashlib.md5(usedforsecurity=False), math.inf if size is None else size
    with file.open("rb") as content:
        while piece := content.read(int(min(left, BLOCK_BYTES))):
            digest.update(piece)
            left -= len(piece)
            progress(len(piece))
    return digest.hexdigest()


class Block(NamedTuple):
    """The bytes of a file from `begin` to before `end`."""

    file: AnyPath
    begin: int
    end: int

    @property
    def digest(self) -> bytes:
        """A 16-byte hash of the bytes."""
        hasher = hashlib.sha256()
        # a request costs as much as reading a block
        step = BLOCK_BYTES if is_remote(self.file) else _READ_BYTES
        for begin in range(self.begin, self.end, step):
            hasher.update(read_range(self.file, begin, min(begin + step, self.end)))
        return hasher.digest()[:_DIGEST_BYTES]


def blocks_of(file: AnyPath, size: int) -> Iterator[Block]:
    """Yields the blocks of a file of `size` bytes, in order."""
    for begin in range(0, size, BLOCK_BYTES):
        yield Block(file, begin, min(size, begin + BLOCK_BYTES))


def digests(
    blocks: Iterable[Block], progress: Callable[[int], None] = lambda _: None
) -> Iterator[bytes]:
    """Yields the hash of each block; blocks are read in parallel. `progress` is called with the
    bytes read.
    """

    def digest(block: Block) -> bytes:
        block_hash = block.digest
        progress(block.end - block.begin)
        return block_hash

    return each_in_threads(digest, blocks, min(_MOST_THREADS, 2 * (os.cpu_count() or 1)))


def joined(block_hashes: Iterable[bytes]) -> str:
    """Returns the hash of a file from its blocks' hashes, in order."""
    return hashlib.sha256(b"".join(block_hashes)).hexdigest()[: 2 * _DIGEST_BYTES]
