"""Hashes of the contents of a dataset's files, kept for as long as the files do not change.

A file on a disk is unchanged while its path, size, inode, change time and modification time are; otherwise it is hashed
again. Only other content makes another store. For an object, the object store's own checksum or version is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxbatch.data.store.cache_folder import cache_file, keep, recall
from maxbatch.system.contents import blocks_of, digests, joined
from maxbatch.system.source_files import SourceFile

_SHOWN_BYTES = 1 << 30  # whose reading is shown
_MOST_BYTES = 1 << 30  # of the hashes of a dataset's files


class Contents(NamedTuple):
    """The hashes of some files, in order."""

    hashes: list[str]
    are_first: bool  # whether none of them has had other content since the first of these hashes was taken


def known_contents(files: Sequence[SourceFile], data_cache_dir: str) -> Contents | None:
    """Returns the hashes of files; None if a file must be read first."""
    kept = _Kept(files, data_cache_dir)
    return None if kept.unknown else Contents(kept.hashes, kept.are_first)


def contents_of(files: Sequence[SourceFile], data_cache_dir: str) -> Contents:
    """Returns the hashes of files; reads those that are new or have changed."""
    kept = _Kept(files, data_cache_dir)
    if not kept.unknown:
        return Contents(kept.hashes, kept.are_first)
    blocks = [list(blocks_of(Path(files[number].path), files[number].size)) for number in kept.unknown]
    flat = [block for of_file in blocks for block in of_file]
    size = sum(files[number].size for number in kept.unknown)
    if size < _SHOWN_BYTES:
        parts = iter(digests(flat))
    else:
        from maxbatch.system.bars import bytes_bar  # slow to import

        with bytes_bar(size, "hashing the files") as progress:
            parts = iter(digests(flat, progress))
    for number, of_file in zip(kept.unknown, blocks, strict=True):
        found = joined(next(parts) for _ in of_file)
        kept.are_first = kept.are_first and kept.hashes[number] in ("", found)
        kept.hashes[number] = found
    kept.write()
    return Contents(kept.hashes, kept.are_first)


class _Kept:
    """The cached hashes of some files, as far as they are still valid."""

    def __init__(self, files: Sequence[SourceFile], data_cache_dir: str) -> None:
        self._path = cache_file(data_cache_dir, "contents", [file.path for file in files])
        self._states = [f"{file.size} {file.stamp} {' '.join(map(str, file.marks))}" for file in files]
        found = recall(self._path, _MOST_BYTES)
        lines, self.are_first = [], True
        if isinstance(found, dict):
            lines, self.are_first = found["files"], found["are_first"] is True
        lines = lines if len(lines) == len(files) else [""] * len(files)
        before = [str(line).rpartition(" ") for line in lines]
        self.hashes = [hashed for _, _, hashed in before]
        self.unknown: list[int] = []
        for number, (file, state, (old_state, _, _)) in enumerate(zip(files, self._states, before, strict=True)):
            if file.content:
                self.hashes[number] = file.content
            elif old_state != state:
                self.unknown.append(number)

    def write(self) -> None:
        """Keeps the hashes, unless the cache may only be read."""
        lines = [f"{state} {hashed}" for state, hashed in zip(self._states, self.hashes, strict=True)]
        with contextlib.suppress(OSError):
            keep(self._path, {"files": lines, "are_first": self.are_first})
