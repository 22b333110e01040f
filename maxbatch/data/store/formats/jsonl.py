"""`jsonl`: every line is a JSON object, and one of its fields is the document, or all of them are; plain or gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from maxbatch.config.values import shown
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import PIECE_BYTES, Bad, Piece, record_as_json
from maxbatch.system.bounded import TOO_MANY_VALUES, has_too_many_values
from maxbatch.system.source_files import SourceFile

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 128 << 20  # bytes; reading a record takes several times as much memory


@dataclass(frozen=True)
class JsonLines:
    """Lines of JSON; blank ones are skipped. Pieces are bytes: a line belongs to the piece that it begins in."""

    text_field: str | None  # None: the whole record, as JSON
    bad: Bad

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields blocks of bytes; a gzip file (recognised by its first bytes) is one piece."""
        with open_file(file) as stream:
            step = max(file.size, 1) if stream.read(2) == _GZIP_MAGIC else PIECE_BYTES
        for begin in range(0, file.size, step):
            end = min(begin + step, file.size)
            yield Piece(file, begin, end, end - begin)

    def documents(self, piece: Piece) -> Iterator[bytes]:
        """Yields the text of each line."""
        with open_file(piece.file) as stream:
            is_gzip = stream.read(2) == _GZIP_MAGIC
            stream.seek(0)
            if is_gzip:
                lines = _lines(gzip.GzipFile(fileobj=stream), 0, None)
            else:
                lines = _lines(stream, piece.begin, piece.end)
            yield from self._texts(lines, piece)

    def _texts(self, lines: Iterable[bytes], piece: Piece) -> Iterator[bytes]:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(_BOM) if number == 1 and piece.begin == 0 else line
                if line.strip():
                    text, problem = self._text(line)
                    yield self._bad_line(piece, number, problem) if problem else text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # The number of lost records is unknown: the rest of the file counts as one.
            yield self._bad_line(piece, number + 1, f"cut short or damaged ({error})")

    def _bad_line(self, piece: Piece, number: int, problem: str) -> bytes:
        return self.bad(f"{piece.file.path} line {_lines_before(piece) + number}: {problem}")

    def _text(self, line: bytes) -> tuple[bytes, str]:
        """Returns the text of a line and "", or b"" and the problem with the line."""
        if len(line) > _LONGEST_LINE:
            return b"", f"longer than {_LONGEST_LINE:,} bytes, the most that is read"
        if has_too_many_values(line):
            return b"", TOO_MANY_VALUES
        try:
            record = json.loads(line.decode("utf-8"))
            if isinstance(record, dict):
                if self.text_field is None:
                    return record_as_json(record), ""
                if isinstance(text := record.get(self.text_field), str):
                    return text.encode("utf-8"), ""
        except UnicodeDecodeError as error:
            return b"", f"not UTF-8 at byte {error.start} of the line"
        except UnicodeEncodeError:
            field = "a field" if self.text_field is None else f"field text_field={shown(repr(self.text_field))}"
            return b"", f"{field} contains half of a surrogate pair"
        except (ValueError, RecursionError) as error:
            return b"", f"not JSON ({error})"
        return b"", self._problem(record)

    def _problem(self, record: object) -> str:
        """Returns why a record has no text."""
        name = shown(repr(self.text_field))
        if not isinstance(record, dict):
            field = "" if self.text_field is None else f" with a field {name}"
            return f"a {type(record).__name__}, not an object{field}"
        if self.text_field in record:
            return f"field text_field={name} is a {type(record[self.text_field]).__name__}, not a string"
        fields = shown(", ".join(map(repr, list(record)[:8])) or "none")
        return f"no field text_field={name}; its fields: {fields}"


def _lines(stream: BinaryIO | gzip.GzipFile, begin: int, end: int | None) -> Iterator[bytes]:
    """Yields the lines that begin in a part of a file (None: to its end); a line that is too long is cut."""
    position = max(begin - 1, 0)
    if position:
        stream.seek(position)
    if begin:
        position += _skip_line(
            stream, None if end is None else end - position
        )  # the end of a line that began before the part
    while (end is None or position < end) and (line := stream.readline(_LONGEST_LINE + 1)):
        position += len(line)
        if len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
            position += _skip_line(stream, None if end is None else end - position)
        yield line


def _skip_line(stream: BinaryIO | gzip.GzipFile, most: int | None) -> int:
    """Reads to the end of a line, or `most` bytes and a block; returns how many bytes it read."""
    skipped = 0
    while (most is None or skipped < most) and (block := stream.readline(_BLOCK_BYTES)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _lines_before(piece: Piece) -> int:
    """Counts the lines that begin before a piece, by reading the file again: only messages need the number."""
    lines = 0
    with open_file(piece.file) as stream:
        left = piece.begin - 1
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines + (piece.begin > 0)
