"""The files beside the tokens of a store, written as its documents arrive, in memory that does not
grow with them.

The table of documents begins with numpy's header, which states their number, so its bytes are left
free until the end. Hashes of blocks are masked by the hash of the whole content, so they wait in a
file without a name.
"""

from __future__ import annotations

import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxbatch.data.store.blocks import BlockHasher, masks

_HEADER_BYTES = 128  # numpy pads its header to this size for any number of documents
_CHUNK_BYTES = 1 << 22
_CHUNK_BLOCKS = 1 << 16


class GrowingTable:
    """The table of documents: int64[documents + 1], the first token of each and at last the number
    of tokens.

    Attributes:
      documents: those that were appended.
      tokens: of all of them.
    """

    def __init__(self, path: Path) -> None:
        self.documents = self.tokens = 0
        self._file: BinaryIO = open(path, "w+b")  # noqa: SIM115  closed by close
        self._file.write(bytes(_HEADER_BYTES + 8))

    def append(self, lengths: np.ndarray) -> None:
        """Adds documents with these numbers of tokens (int64)."""
        self._file.write((self.tokens + np.cumsum(lengths)).astype("<i8").data)
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())

    def finish(self) -> None:
        """Writes the header."""
        header = io.BytesIO()
        facts = {"descr": "<i8", "fortran_order": False, "shape": (self.documents + 1,)}
        np.lib.format.write_array_header_1_0(header, facts)
        assert header.tell() == _HEADER_BYTES, "numpy's header has another size"
        self._file.seek(0)
        self._file.write(header.getvalue())
        self._file.flush()
        os.fsync(self._file.fileno())

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes of the finished file."""
        self._file.seek(0)
        return iter(lambda: self._file.read(_CHUNK_BYTES), b"")

    def close(self) -> None:
        self._file.close()


class GrowingHashes:
    """The hashes of the blocks of a store's files, in the order of the files."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by close
        self.num_blocks = 0

    def append(self, hashes: np.ndarray) -> None:
        """Adds the hashes (uint32, not masked) of the next blocks."""
        self._file.write(hashes.astype("<u4", copy=False).data)
        self.num_blocks += len(hashes)

    def append_table(self, table: GrowingTable) -> int:
        """Adds the hashes of the table of documents; returns the CRC-32 of its file."""
        hasher, checksum = BlockHasher(self.append), 0
        for chunk in table.chunks():
            hasher.update(chunk)
            checksum = zlib.crc32(chunk, checksum)
        hasher.finish()
        return checksum

    def write(self, path: Path, content: str) -> None:
        """Writes the hashes to a file, masked by the hash of the store's content."""
        self._file.seek(0)
        with open(path, "wb") as file:
            for first in range(0, self.num_blocks, _CHUNK_BLOCKS):
                hashes = np.frombuffer(self._file.read(4 * _CHUNK_BLOCKS), "<u4")
                file.write((hashes ^ masks(content, first, len(hashes))).astype("<u4").data)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._file.close()
