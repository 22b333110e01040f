"""Formats: what the files of a dataset look like, and how their documents are read piece by piece.

A piece is a part of a file that can be read by itself, so that several processes share the work; the documents of
a file are those of its pieces, in order. A document is UTF-8 text, held as bytes; a record that is left out is
handed on as the empty document, so that whoever reads on can count it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from maxbatch.data.store.files import SourceFile

# Says what is wrong with a record: raises, or returns the empty document where bad records are left out.
Bad = Callable[[str], bytes]

# Pieces are about so large: enough to be worth a request to a worker, and few enough to share evenly.
PIECE_BYTES = 4 << 20


class Piece(NamedTuple):
    """A part of a file: from `begin` up to `end` in the unit of its format (bytes, row groups, records).

    `size` is about how many bytes of the file that is.
    """

    file: SourceFile
    begin: int
    end: int
    size: int


class Format(Protocol):
    """One format's reader."""

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields the pieces of a file, in order."""
        ...

    def documents(self, piece: Piece) -> Iterator[bytes]:
        """Yields the documents of a piece, in order; b"" for each record left out."""
        ...


_SHARD = r"([-._]\d{3,}-of-\d{3,})?"
# Which files of a folder count, by dataset_type; shards may be numbered before or after the suffix.
FOLDER_FILES: dict[str, tuple[re.Pattern[str], str]] = {
    "text": (re.compile(""), "regular"),
    "jsonl": (re.compile(rf"\.(jsonl|ndjson){_SHARD}(\.gz)?$|\.json\.gz$"), ".jsonl, .ndjson or .jsonl.gz"),
    "parquet": (re.compile(rf"\.parquet{_SHARD}$"), ".parquet"),
    "arrayrecord": (
        re.compile(rf"\.(array_record|arrayrecord){_SHARD}$"),
        ".array_record or .arrayrecord",
    ),
}


def make_format(dataset_type: str, record_format: str, text_field: str | None, bad: Bad) -> Format:
    """Returns the reader of a `dataset_type` that names files.

    Without a text_field (jsonl and parquet) its documents are whole records, each as `record_as_json` writes it.

    Raises:
      ConfigError: its package is not installed.
    """
    if dataset_type == "jsonl":
        from maxbatch.data.store.formats.jsonl import JsonLines

        return JsonLines(text_field, bad)
    if dataset_type == "parquet":
        from maxbatch.data.store.formats.parquet import Parquet

        return Parquet(text_field, bad)
    assert text_field is not None, "only jsonl and parquet give whole records"
    if dataset_type == "arrayrecord":
        from maxbatch.data.store.formats.arrayrecord import ArrayRecords

        return ArrayRecords(record_format, text_field, bad)
    from maxbatch.data.store.formats.text import TextFiles

    return TextFiles(bad)


def record_as_json(record: Mapping[str, Any]) -> bytes:
    """Returns a record as one JSON object in UTF-8, fields in order of their names; equal records, equal bytes.

    Values that JSON has no form for (bytes, dates, decimals of Parquet) become text.

    Raises:
      UnicodeEncodeError: half of a surrogate pair, which is no text.
    """
    text = json.dumps(
        record, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_without_json_form
    )
    return text.encode("utf-8")


def _without_json_form(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def checked_utf8(utf8: bytes, place: str, bad: Bad) -> bytes:
    """Returns the text, or what `bad` makes of bytes that are no UTF-8."""
    try:
        utf8.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad(f"{place}: not UTF-8 at byte {error.start} ({error.reason})")
    return utf8
