"""`arrayrecord`: every record is a document, as UTF-8 text or inside a tf.train.Example."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from maxbatch.around.formats.example import example_field
from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.data.store.files import local_path
from maxbatch.data.store.formats import PIECE_BYTES, Piece, Record, TokenIds, checked_utf8
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.source_files import SourceFile, typed_reason
from maxbatch.system.storage.storage import is_remote

_BATCH_BYTES = 1 << 20


class ArrayRecords:
    """Records of ArrayRecord files (Grain's and TFDS's format). Pieces are ranges of records."""

    unit: ClassVar[str] = "record"

    def __init__(self, record_format: str, text_field: str | None):
        assert text_field is not None, "only records with fields are whole"
        try:  # It comes with Grain, except on Windows.
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError as error:
            raise ConfigError(
                "dataset_type=arrayrecord: needs array_record, which is not installed; pip "
                "install array_record"
            ) from error
        self._reader = ArrayRecordReader
        self._feature = text_field if record_format == "example" else None

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields ranges of records; a remote file is one piece, since it is copied for each
        piece.
        """
        with local_path(file) as path:
            records = self._opened(path).num_records()
        step = (
            max(records, 1)
            if is_remote(file.path)
            else max(1, records * PIECE_BYTES // max(file.size, 1))
        )
        for begin in range(0, max(records, 1), step):
            end = min(begin + step, records)
            yield Piece(file, begin, end, file.size * (end - begin) // max(records, 1))

    def documents(self, piece: Piece) -> Iterator[Record]:
        """Yields the text of each record; records whose checksums differ are left out one by
        one.
        """
        with local_path(piece.file) as path:
            reader = self._opened(path)
            if not reader.ok():
                yield Record(1, b"", "not an ArrayRecord file, or cut short")
                return
            average = max(1, piece.file.size // max(reader.num_records(), 1))
            step = max(1, _BATCH_BYTES // average)
            for begin in range(piece.begin, piece.end, step):
                numbers = range(begin, min(begin + step, piece.end))
                for number, record in zip(numbers, _records(reader, numbers), strict=True):
                    yield self._record(record, number - piece.begin + 1)

    def records_before(self, piece: Piece) -> int:
        return piece.begin

    def _opened(self, path: str) -> Any:
        os.stat(path)  # The reader treats a missing file as an empty one.
        # As bytes: a name need not be UTF-8.
        return self._reader(os.fsencode(path), options="readahead_buffer_size:0,max_parallelism:0")

    def _record(self, record: bytes | RuntimeError, number: int) -> Record:
        if isinstance(record, RuntimeError):
            return Record(number, b"", f"damaged ({typed_reason(record)})")
        if self._feature is not None:
            try:
                record = example_field(record, self._feature)
            except ValueError as error:
                return Record(number, b"", str(error))
        return (
            Record(number, record) if isinstance(record, TokenIds) else checked_utf8(number, record)
        )


def _records(reader: Any, numbers: range) -> list[bytes | RuntimeError]:
    """Reads a range of records at once, or one by one if one of them is damaged."""
    try:
        records: list[bytes | RuntimeError] = reader.read(numbers.start, numbers.stop)
        return records
    except RuntimeError as error:
        if len(numbers) == 1:
            return [error]
        return [
            record for number in numbers for record in _records(reader, range(number, number + 1))
        ]


FORMAT = FileFormat(
    ArrayRecords,
    re.compile(rf"\.(array_record|arrayrecord){SHARD}$"),
    ".array_record or .arrayrecord",
    has_text_field=True,
    has_record_formats=True,
)
