"""`text`: every file of UTF-8 text is a document; one of them is held in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from maxbatch.config.file_formats import FileFormat
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import Piece, Record, WholeFiles, checked_utf8


class TextFiles(WholeFiles):
    """Files of text."""

    unit: ClassVar[str] = ""

    def documents(self, piece: Piece) -> Iterator[Record]:
        with open_file(piece.file) as file:
            yield checked_utf8(1, file.read())


FORMAT = FileFormat(lambda record_format, text_field: TextFiles(), re.compile(""), "regular")
