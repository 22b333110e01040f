"""`jsonl`: every line is a JSON object, and one of its fields is the document, or all of them are;
plain or gzip.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import (
    BLANK,
    LONGEST_RECORD,
    PIECE_BYTES,
    Piece,
    Record,
    content_of,
)
from maxbatch.data.store.gzip_cuts import MAGIC, Cut, line_cuts
from maxbatch.system.storage.bounded import TOO_MANY_VALUES, has_too_many_values
from maxbatch.system.storage.source_files import SourceFile
from maxbatch.system.storage.storage import is_remote

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class JsonLines:
    """Lines of JSON; blank ones are skipped. Pieces are bytes: a line belongs to the piece that it
    begins in.
    """

    unit: ClassVar[str] = "line"

    text_field: str | None  # None: the whole record, as JSON

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields blocks of bytes; of a gzip file (recognised by its first bytes) lines of whole
        members.
        """
        with open_file(file) as stream:
            is_gzip = stream.read(len(MAGIC)) == MAGIC
            if is_gzip:
                yield from _packed_pieces(file, stream)
        if not is_gzip:
            for begin in range(0, file.size, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, file.size)
                yield Piece(file, begin, end, end - begin)

    def documents(self, piece: Piece) -> Iterator[Record]:
        with open_file(piece.file) as stream:
            if piece.cut is None:
                lines = _lines(stream, piece.begin, piece.end)
            else:
                lines = _packed_lines(stream, piece.cut, piece.end)
            yield from self._records(lines, piece)

    def records_before(self, piece: Piece) -> int:
        return _lines_before(piece)

    def _records(self, lines: Iterable[bytes], piece: Piece) -> Iterator[Record]:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                is_first = number == 1 and piece.begin == 0
                line = line.removeprefix(_BOM) if is_first else line
                if not line.strip():
                    yield Record(number, b"", BLANK)
                else:
                    content, problem = self._content(line)
                    if is_first and problem and line.lstrip().startswith(b"["):
                        problem += "; a file of one array of objects is read by dataset_type=json"
                    yield Record(number, content, problem)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # The number of lost records is unknown: the rest of the file counts as one.
            yield Record(number + 1, b"", f"cut short or damaged ({error})")

    def _content(self, line: bytes) -> tuple[bytes, str]:
        """Returns the document of a line and "", or b"" and the problem with the line."""
        if len(line) > LONGEST_RECORD:
            return b"", f"longer than {LONGEST_RECORD:,} bytes, the most that is read"
        if has_too_many_values(line):
            return b"", TOO_MANY_VALUES
        try:
            return content_of(json.loads(line.decode("utf-8")), self.text_field)
        except UnicodeDecodeError as error:
            return b"", f"not UTF-8 at byte {error.start} of the line"
        except (ValueError, RecursionError) as error:
            return b"", f"not JSON ({error})"


def _lines(stream: BinaryIO | gzip.GzipFile, begin: int, end: int) -> Iterator[bytes]:
    """Yields the lines that begin in a part of a file; a line that is too long is cut."""
    position = max(begin - 1, 0)
    if position:
        stream.seek(position)
    if begin:
        # the end of a line that began before the part
        position += _skip_line(stream, end - position)
    while position < end and (line := stream.readline(LONGEST_RECORD + 1)):
        position += len(line)
        if len(line) > LONGEST_RECORD and not line.endswith(b"\n"):
            position += _skip_line(stream, end - position)
        yield line


def _skip_line(stream: BinaryIO | gzip.GzipFile, most: int) -> int:
    """Reads to the end of a line, or `most` bytes and a block; returns how many bytes it read."""
    skipped = 0
    while skipped < most and (block := stream.readline(_BLOCK_BYTES)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _packed_pieces(file: SourceFile, stream: BinaryIO) -> Iterator[Piece]:
    """Yields the pieces of a gzip file; one in an object store is one piece, since finding its cuts
    would read it.
    """
    is_cut = file.size > PIECE_BYTES and not is_remote(file.path)
    first, end = Cut(0, 0, 0), Cut(sys.maxsize, file.size, 0)
    cuts = itertools.chain([first], line_cuts(stream, PIECE_BYTES) if is_cut else (), [end])
    for cut, after in itertools.pairwise(cuts):
        yield Piece(file, cut.line, after.line, after.member - cut.member, cut)


def _packed_lines(stream: BinaryIO, cut: Cut, end: int) -> Iterator[bytes]:
    """Yields the lines of a gzip file from a cut to `end`, in bytes of the content."""
    stream.seek(cut.member)
    content, left = gzip.GzipFile(fileobj=stream), cut.line - cut.member_content
    while left and (block := content.read(min(left, _BLOCK_BYTES))):
        left -= len(block)
    yield from _lines(content, 0, end - cut.line)


def _lines_before(piece: Piece) -> int:
    """Counts the lines that begin before a piece, by reading the file again: only messages need the
    number.
    """
    if not piece.begin:
        return 0
    with open_file(piece.file) as file:
        if piece.cut:
            return sum(1 for _ in _lines(gzip.GzipFile(fileobj=file), 0, piece.begin))
        lines, left = 1, piece.begin - 1
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


FORMAT = FileFormat(
    lambda record_format, text_field: JsonLines(text_field),
    re.compile(rf"\.(jsonl|ndjson){SHARD}(\.gz)?$|\.json\.gz$"),
    ".jsonl, .ndjson or .jsonl.gz",
    has_records=True,
)
