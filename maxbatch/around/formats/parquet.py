"""`parquet`: every row is a document, its text one column or all of them. Needs pyarrow (extra
`parquet`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.config.values import shown
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import (
    PIECE_BYTES,
    Piece,
    Record,
    checked_utf8,
    grouped,
    record_as_json,
)
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage.source_files import SourceFile, typed_reason

_BATCH_ROWS = 512
_READ_AHEAD_BYTES = 1 << 20


class Parquet:
    """Rows of Parquet files. Pieces are runs of row groups; only the text column is read, a few
    rows at a time.
    """

    unit: ClassVar[str] = "row"

    def __init__(self, text_field: str | None):
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                "dataset_type=parquet: needs pyarrow, which is not installed; pip install "
                "'maxbatch[parquet]'"
            ) from error
        self._arrow = pyarrow
        self._text_field = text_field
        self._columns = None if text_field is None else [text_field]

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields runs of row groups; a single empty one if the file is not a Parquet file."""
        try:
            with self._opened(file) as parquet:
                groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
                sizes = [group.total_byte_size for group in groups]
        except (self._arrow.ArrowException, OSError) as error:
            _raise_system_error(error)
            yield Piece(file, 0, 0, file.size)
            return
        # The groups' sizes are those of unpacked data; progress is counted in bytes of the file.
        share = file.size / max(sum(sizes), 1)
        for run in grouped(range(len(sizes)), sizes.__getitem__, PIECE_BYTES, len(sizes)):
            size = sum(sizes[group] for group in run)
            yield Piece(file, run[0], run[-1] + 1, int(size * share))

    def documents(self, piece: Piece) -> Iterator[Record]:
        """Yields the text of each row. In a damaged row group the rows from the damage on are left
        out.
        """
        path = piece.file.path
        try:
            with self._opened(piece.file) as parquet:
                names = parquet.schema_arrow.names
                if self._text_field is not None and self._text_field not in names:
                    columns = shown(", ".join(map(repr, names[:12])))
                    raise ConfigError(
                        f"text_field={shown(repr(self._text_field))}: {path} has no such column; "
                        f"its columns: {columns}; works: "
                        f"text_field={_likely_text(parquet.schema_arrow)}"
                    )
                first = 1
                for group in range(piece.begin, piece.end):
                    yield from self._rows(parquet, group, first)
                    first += parquet.metadata.row_group(group).num_rows
        except (self._arrow.ArrowException, OSError) as error:
            _raise_system_error(error)
            yield Record(1, b"", f"not a whole Parquet file ({typed_reason(error)})")

    def records_before(self, piece: Piece) -> int:
        if not piece.begin:
            return 0
        with self._opened(piece.file) as parquet:
            return sum(parquet.metadata.row_group(group).num_rows for group in range(piece.begin))

    @contextlib.contextmanager
    def _opened(self, file: SourceFile) -> Iterator[Any]:
        # Without read-ahead of whole column chunks a row group of any size takes little memory.
        options = {
            "pre_buffer": False,
            "buffer_size": _READ_AHEAD_BYTES,
            "page_checksum_verification": True,
        }
        with (
            open_file(file) as stream,
            self._arrow.parquet.ParquetFile(stream, **options) as parquet,
        ):
            yield parquet

    def _rows(self, parquet: Any, group: int, first: int) -> Iterator[Record]:
        """Yields the rows of a group, numbered from `first` on."""
        end = first + parquet.metadata.row_group(group).num_rows
        number = first
        try:
            for batch in parquet.iter_batches(
                _BATCH_ROWS, row_groups=[group], columns=self._columns
            ):
                for value in self._texts(batch, f"row group {group}"):
                    yield self._checked(number, value)
                    number += 1
        except (self._arrow.ArrowException, OSError) as error:
            _raise_system_error(error)
            for lost in range(number, end):
                yield Record(lost, b"", f"damaged ({typed_reason(error)})")

    def _checked(self, number: int, value: bytes | None) -> Record:
        if value is not None:
            return checked_utf8(number, value)
        return Record(
            number, b"", f"{self._text_field} is null" if self._text_field else "not UTF-8"
        )

    def _texts(self, batch: Any, place: str) -> list[bytes | None]:
        if self._text_field is None:
            return [_whole(batch.slice(row, 1)) for row in range(batch.num_rows)]
        column = batch.column(0)
        types = self._arrow.types
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        texts = (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
        )
        if not any(is_text(kind) for is_text in texts):
            raise ConfigError(
                f"text_field={shown(repr(self._text_field))}: the column is of type "
                f"{shown(str(kind))} at {place}, not a string; name a column of strings"
            )
        texts_n: list[bytes | None] = column.cast(self._arrow.large_binary()).to_pylist()
        return texts_n


def _whole(row: Any) -> bytes | None:
    try:
        return record_as_json(row.to_pylist()[0])
    except UnicodeDecodeError:
        return None


def _likely_text(schema: Any) -> str:
    strings = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    return repr(strings[0]) if strings else "another file: this one has no column of strings"


def _raise_system_error(error: Exception) -> None:
    """Raises an error of the system or of a store, and leaves pyarrow's own OSErrors, which have no
    number.
    """
    if getattr(error, "errno", None) or isinstance(error, ConfigError | TrainingError):
        raise error


FORMAT = FileFormat(
    lambda record_format, text_field: Parquet(text_field),
    re.compile(rf"\.parquet{SHARD}$"),
    ".parquet",
    has_records=True,
)
