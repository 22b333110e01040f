"""`text`: every file is a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import Bad, Piece, checked_utf8
from maxbatch.data.store.storage import SourceFile


@dataclass(frozen=True)
class TextFiles:
    """Files of UTF-8 text; one of them is held in memory at a time."""

    bad: Bad

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields the whole file."""
        yield Piece(file, 0, file.size, file.size)

    def documents(self, piece: Piece) -> Iterator[bytes]:
        """Yields the file's bytes."""
        with open_file(piece.file) as file:
            yield checked_utf8(file.read(), piece.file.path, self.bad)
