"""The file formats of datasets, and how their documents are read piece by piece.

A piece is a part of a file that can be read by itself, so that several processes can share the
work; the documents of a file are those of its pieces, in order. A document is UTF-8 text or token
ids, held as bytes; a bad record is yielded with its problem, and its number in the piece, so that
the reader can name, count or refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Protocol, TypeVar, cast

from maxbatch.config.file_formats import file_format
from maxbatch.config.values import shown, shown_fields
from maxbatch.data.store.gzip_cuts import Cut
from maxbatch.system.storage.source_files import SourceFile

# The size of a piece, about: large enough to be worth a request to a worker, small enough to share
# evenly.
PIECE_BYTES = 4 << 20
# The version of the rules by which files are cut: a build that was killed continues behind a number
# of pieces.
CUTTING = 3

LONGEST_RECORD = 128 << 20  # bytes of a text; reading a record takes several times as much memory

T = TypeVar("T")


class TokenIds(bytes):
    """A document that is token ids already: int64, little-endian."""


class Piece(NamedTuple):
    """A part of a file."""

    file: SourceFile
    # in the unit of the format: bytes, of the content if it is packed, row groups or records
    begin: int
    end: int
    size: int  # about how many bytes of the file it is
    # of a gzip file: the member that decompressing begins at; None: the first
    cut: Cut | None = None


class Record(NamedTuple):
    """A record of a piece."""

    number: int  # in the piece, from 1
    content: bytes  # UTF-8 text, `TokenIds`, or the whole record as JSON; empty: it is left out
    problem: str = ""  # why it is bad


BLANK = "blank"  # the problem of a line that is no record, and is counted as one of the file


class Format(Protocol):
    """One format's reader."""

    # what a record is in its file, for messages: a line, a row; "": the file itself
    unit: ClassVar[str]

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields the pieces of a file, in order."""
        ...

    def documents(self, piece: Piece) -> Iterator[Record]:
        """Yields the records of a piece, in order, and lines between them as `BLANK` ones."""
        ...

    def records_before(self, piece: Piece) -> int:
        """Counts the records of the file before a piece, which may read the file: only messages
        need the number.
        """
        ...


class WholeFiles:
    """The pieces of a format whose files cannot be cut: one a file."""

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        yield Piece(file, 0, file.size, file.size)

    def records_before(self, piece: Piece) -> int:
        return 0


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], size: int, count: int
) -> Iterator[list[T]]:
    """Yields the items in order, in groups that end at `count` items or once they have the total
    size `size`.
    """
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= size or len(group) >= count:
            yield group
            group, total = [], 0
    if group:
        yield group


def make_format(dataset_type: str, record_format: str, text_field: str | None) -> Format:
    """Returns the reader of a `dataset_type` of files.

    If `text_field` is None (of formats whose records have fields), its documents are whole records,
    each as `record_as_json` writes it.

    Raises:
      ConfigError: its package is not installed.
    """
    return cast(Format, file_format(dataset_type).open(record_format, text_field))


def record_as_json(record: Mapping[str, object]) -> bytes:
    """Returns a record as one JSON object in UTF-8, fields in order of their names; equal records
    give equal bytes.

    Values that JSON cannot hold (bytes, dates, decimals of Parquet) become text.

    Raises:
      UnicodeEncodeError: a text contains half of a surrogate pair.
    """
    text = json.dumps(
        record, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_as_text
    )
    return text.encode("utf-8")


def _as_text(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def checked_utf8(number: int, utf8: bytes) -> Record:
    """Returns the record of a text, which is bad unless its bytes are UTF-8."""
    try:
        utf8.decode("utf-8")
    except UnicodeDecodeError as error:
        return Record(number, b"", f"not UTF-8 at byte {error.start} ({error.reason})")
    return Record(number, utf8)


def content_of(record: object, text_field: str | None) -> tuple[bytes, str]:
    """Returns the document of a record with fields and "", or b"" and the problem with the record.

    Args:
      text_field: the field with the text; None: the document is the whole record, as JSON.
    """
    name = shown(repr(text_field))
    if not isinstance(record, dict):
        field = "" if text_field is None else f" with a field {name}"
        return b"", f"a {type(record).__name__}, not an object{field}"
    try:
        if text_field is None:
            return record_as_json(record), ""
        if isinstance(text := record.get(text_field), str):
            return text.encode("utf-8"), ""
    except UnicodeEncodeError:
        return (
            b"",
            f"{'a field' if text_field is None else f'field text_field={name}'} contains half of "
            "a surrogate pair",
        )
    if text_field not in record:
        return b"", f"no field text_field={name}; its fields: {shown_fields(record)}"
    value = record[text_field]
    kind = "null" if value is None else f"a {type(value).__name__}"
    return b"", f"field text_field={name} is {kind}, not a string"
