"""`jsonl`: every line is a JSON object, one of its fields the document, or all of them; plain or gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from maxbatch.data.store.files import SourceFile, open_file
from maxbatch.data.store.formats import PIECE_BYTES, Bad, Piece, record_as_json

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonLines:
    """Lines of JSON; blank ones are nothing. Pieces are bytes: a line belongs to the piece that it begins in."""

    text_field: str | None  # None: the whole record, as JSON
    bad: Bad

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields blocks of bytes; a gzip file (known by its first bytes) is one piece."""
        with open_file(file) as stream:
            step = max(file.size, 1) if stream.read(2) == _GZIP_MAGIC else PIECE_BYTES
        for begin in range(0, file.size, step):
            end = min(begin + step, file.size)
            yield Piece(file, begin, end, end - begin)

    def documents(self, piece: Piece) -> Iterator[bytes]:
        """Yields the text of each line."""
        with open_file(piece.file) as stream:
            if stream.read(2) == _GZIP_MAGIC:
                stream.seek(0)
                yield from self._unpacked(stream, piece)
            else:
                yield from self._lines(stream, piece)

    def _lines(self, stream: BinaryIO, piece: Piece) -> Iterator[bytes]:
        position = max(piece.begin - 1, 0)
        stream.seek(position)
        if piece.begin:
            position += len(stream.readline())  # The end of a line that began before.
        number = 0
        while position < piece.end and (line := stream.readline()):
            number += 1
            begin, position = position, position + len(line)
            if begin == 0:
                line = line.removeprefix(_BOM)
            if line.strip():
                text, problem = self._text(line)
                if problem:
                    text = self.bad(f"{piece.file.path} line {_lines_before(piece) + number}: {problem}")
                yield text

    def _unpacked(self, stream: BinaryIO, piece: Piece) -> Iterator[bytes]:
        number = 0
        try:
            with gzip.GzipFile(fileobj=stream) as lines:
                for number, line in enumerate(lines, 1):
                    line = line.removeprefix(_BOM) if number == 1 else line
                    if line.strip():
                        text, problem = self._text(line)
                        yield self.bad(f"{piece.file.path} line {number}: {problem}") if problem else text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # How many records are lost cannot be known: the rest of the file counts as one.
            yield self.bad(f"{piece.file.path} line {number + 1}: cut short or damaged ({error})")

    def _text(self, line: bytes) -> tuple[bytes, str]:
        """Returns the text of a line, or nothing and what is wrong with it."""
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return b"", f"not UTF-8 at byte {error.start} of the line"
        except (ValueError, RecursionError) as error:
            return b"", f"not JSON ({error})"
        if self.text_field is None:
            return _whole(record)
        field = f"field text_field={self.text_field!r}"
        if not isinstance(record, dict):
            return b"", f"a {type(record).__name__}, not an object with a field {self.text_field!r}"
        if self.text_field not in record:
            fields = ", ".join(map(repr, list(record)[:8])) or "none"
            return b"", f"no {field}; its fields: {fields}"
        text = record[self.text_field]
        if not isinstance(text, str):
            return b"", f"{field} is a {type(text).__name__}, not a string"
        try:
            return text.encode("utf-8"), ""
        except UnicodeEncodeError:
            return b"", f"{field} has half of a surrogate pair: no text"


def _whole(record: Any) -> tuple[bytes, str]:
    if not isinstance(record, dict):
        return b"", f"a {type(record).__name__}, not an object"
    try:
        return record_as_json(record), ""
    except UnicodeEncodeError:
        return b"", "a field has half of a surrogate pair: no text"


def _lines_before(piece: Piece) -> int:
    """Counts the lines that begin before a piece; read again, since only messages want to know."""
    lines = 0
    with open_file(piece.file) as stream:
        left = piece.begin - 1
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines + (piece.begin > 0)
