"""Hashes of the contents of a dataset's files, kept for as long as the files do not change.

A file on a disk is unchanged while its path, size, inode, change time and modification time are;
otherwise it is hashed again. Only other content makes another store. For an object, the object
store's own checksum or version is taken.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from maxbatch.data.store.cache_folder import cache_file, keep, recall_list
from maxbatch.data.store.documents import Files
from maxbatch.system.storage.contents import Block, blocks_of, digests, joined
from maxbatch.system.storage.long_lists import LongList, Mapped
from maxbatch.system.storage.source_files import SourceFile

_SHOWN_BYTES = 1 << 30  # whose reading is shown


def known_contents(files: Files, data_cache_dir: str) -> Iterable[str] | None:
    """Returns the hashes of files, in order; None if a file must be read first."""
    kept = _Kept(files, data_cache_dir)
    return None if kept.num_unknown else kept.hashes


def contents_of(files: Files, data_cache_dir: str) -> Iterable[str]:
    """Returns the hashes of files, in order; reads those that are new or have changed."""
    kept = _Kept(files, data_cache_dir)
    if not kept.num_unknown:
        return kept.hashes
    if kept.unknown_bytes < _SHOWN_BYTES:
        kept.take(digests(kept.unknown_blocks()))
    else:
        from maxbatch.system.terminal.bars import bytes_bar  # slow to import

        with bytes_bar(kept.unknown_bytes, "hashing the files") as progress:
            kept.take(digests(kept.unknown_blocks(), progress))
    kept.write()
    return kept.hashes


class _Entry(NamedTuple):
    """The recorded state and hash of a file."""

    state: str  # its size and marks
    hashed: str  # of its content, or of former content
    is_known: bool  # whether the hash is of its content

    @property
    def line(self) -> str:
        return f"{self.state} {self.hashed}"


class _Kept:
    """The cached hashes of some files, as far as they are still valid."""

    def __init__(self, files: Files, data_cache_dir: str) -> None:
        self._files = files
        self._path = cache_file(
            data_cache_dir, "contents", Mapped(operator.attrgetter("path"), files)
        )
        lists = recall_list(self._path, "files")
        lines = lists[0] if lists else LongList[object]()
        self.num_unknown = self.unknown_bytes = 0
        self._entries = LongList(
            self._found(lines if len(lines) == len(files) else itertools.repeat(""))
        )

    def _found(self, lines: Iterable[object]) -> Iterator[_Entry]:
        for file, line in zip(self._files, lines, strict=False):
            state = f"{file.size} {file.stamp} {' '.join(map(str, file.marks))}"
            old_state, _, hashed = str(line).rpartition(" ")
            is_known = bool(file.content) or old_state == state
            if not is_known:
                self.num_unknown += 1
                self.unknown_bytes += file.size
            yield _Entry(state, file.content or hashed, is_known)

    @property
    def hashes(self) -> Iterable[str]:
        return Mapped(operator.attrgetter("hashed"), self._entries)

    def unknown_blocks(self) -> Iterator[Block]:
        """Yields the blocks of the files to read."""
        for file, entry in zip(self._files, self._entries, strict=True):
            if not entry.is_known:
                yield from _blocks(file)

    def take(self, hashes: Iterator[bytes]) -> None:
        """Takes the hashes of the blocks of the files that were read."""
        entries = LongList[_Entry]()
        for file, entry in zip(self._files, self._entries, strict=True):
            if not entry.is_known:
                hashed = joined(next(hashes) for _ in _blocks(file))
                entry = entry._replace(hashed=hashed, is_known=True)
            entries.append(entry)
        self._entries = entries

    def write(self) -> None:
        """Keeps the hashes, unless the cache may only be read."""
        lines = Mapped(operator.attrgetter("line"), self._entries)
        with contextlib.suppress(OSError):
            keep(self._path, {"files": lines})


def _blocks(file: SourceFile) -> Iterator[Block]:
    return blocks_of(Path(file.path), file.size)
