"""The file formats of datasets, and how their documents are read piece by piece.

A piece is a part of a file that can be read by itself, so that several processes can share the work; the documents of
a file are those of its pieces, in order. A document is UTF-8 text or token ids, held as bytes; a record that is left
out is yielded as an empty document, so that the reader can count it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats.gzip_cuts import Cut
from maxbatch.system.source_files import SourceFile

# Handles a bad record, given its problem: raises, or returns the empty document if bad records are left out.
Bad = Callable[[str], bytes]

# The size of a piece, about: large enough to be worth a request to a worker, small enough to share evenly.
PIECE_BYTES = 4 << 20
# The version of the rules by which files are cut: a build that was killed continues behind a number of pieces.
CUTTING = 2

T = TypeVar("T")


class TokenIds(bytes):
    """A document that is token ids already: int64, little-endian."""


class Piece(NamedTuple):
    """A part of a file."""

    file: SourceFile
    begin: int  # in the unit of the format: bytes, of the content if it is packed, row groups or records
    end: int
    size: int  # about how many bytes of the file it is
    cut: Cut | None = None  # of a gzip file: the member that decompressing begins at; None: the first


class Format(Protocol):
    """One format's reader."""

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields the pieces of a file, in order."""
        ...

    def documents(self, piece: Piece) -> Iterator[bytes]:
        """Yields the documents of a piece, in order; b"" for each record left out."""
        ...


@dataclass(frozen=True)
class TextFiles:
    """`text`: every file of UTF-8 text is a document; one of them is held in memory at a time."""

    bad: Bad

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        yield Piece(file, 0, file.size, file.size)

    def documents(self, piece: Piece) -> Iterator[bytes]:
        with open_file(piece.file) as file:
            yield checked_utf8(file.read(), piece.file.path, self.bad)


_SHARD = r"([-._]\d{3,}-of-\d{3,})?"
# Which files of a folder count, by dataset_type; shards may be numbered before or after the suffix.
FOLDER_FILES: dict[str, tuple[re.Pattern[str], str]] = {
    "text": (re.compile(""), "regular"),
    "jsonl": (re.compile(rf"\.(jsonl|ndjson){_SHARD}(\.gz)?$|\.json\.gz$"), ".jsonl, .ndjson or .jsonl.gz"),
    "parquet": (re.compile(rf"\.parquet{_SHARD}$"), ".parquet"),
    "arrayrecord": (re.compile(rf"\.(array_record|arrayrecord){_SHARD}$"), ".array_record or .arrayrecord"),
    "tfrecord": (re.compile(rf"\.(tfrecords?|tfrec){_SHARD}(\.gz)?$"), ".tfrecord, .tfrecords or .tfrec"),
}


def grouped(items: Iterable[T], size_of: Callable[[T], int], size: int, count: int) -> Iterator[list[T]]:
    """Yields the items in order, in groups that end at `count` items or once they have the total size `size`."""
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


def make_format(dataset_type: str, record_format: str, text_field: str | None, bad: Bad) -> Format:
    """Returns the reader of a `dataset_type` of files.

    If `text_field` is None (jsonl and parquet), its documents are whole records, each as `record_as_json` writes it.

    Raises:
      ConfigError: its package is not installed.
    """
    if dataset_type == "jsonl":
        from maxbatch.data.store.formats.jsonl import JsonLines

        return JsonLines(text_field, bad)
    if dataset_type == "parquet":
        from maxbatch.data.store.formats.parquet import Parquet

        return Parquet(text_field, bad)
    assert text_field is not None, "only jsonl and parquet have whole records"
    if dataset_type == "arrayrecord":
        from maxbatch.data.store.formats.arrayrecord import ArrayRecords

        return ArrayRecords(record_format, text_field, bad)
    if dataset_type == "tfrecord":
        from maxbatch.data.store.formats.tfrecord import TFRecords

        return TFRecords(text_field, bad)
    return TextFiles(bad)


def record_as_json(record: Mapping[str, object]) -> bytes:
    """Returns a record as one JSON object in UTF-8, fields in order of their names; equal records give equal bytes.

    Values that JSON cannot hold (bytes, dates, decimals of Parquet) become text.

    Raises:
      UnicodeEncodeError: a text contains half of a surrogate pair.
    """
    text = json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_as_text)
    return text.encode("utf-8")


def _as_text(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def checked_utf8(utf8: bytes, place: str, bad: Bad) -> bytes:
    """Returns the bytes if they are UTF-8, else what `bad` returns."""
    try:
        utf8.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad(f"{place}: not UTF-8 at byte {error.start} ({error.reason})")
    return utf8
