"""`csv` and `tsv`: every row below the header is a record, whose cells are texts; plain or gzip.

Cells may be in double quotes and then hold line breaks, so a file is one piece, read by one
process. Blank lines are skipped. Reference: RFC 4180.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from maxbatch.around.formats.packed import opened_text
from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.config.values import shown
from maxbatch.data.store.formats import LONGEST_RECORD, Piece, Record, WholeFiles, content_of
from maxbatch.system.errors import ConfigError


@dataclass(frozen=True)
class Table(WholeFiles):
    """Rows of text. The number of a record does not count the header."""

    unit: ClassVar[str] = "record"

    delimiter: str
    text_field: str | None  # None: the whole record, as JSON

    def documents(self, piece: Piece) -> Iterator[Record]:
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_RECORD))
        with opened_text(piece.file) as text:
            rows = csv.reader(text, delimiter=self.delimiter, strict=True)
            header: list[str] | None = None
            number = 0
            while True:
                try:
                    cells = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    number += 1
                    yield Record(number, b"", f"not a row of cells ({error})")
                    continue
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    # The number of lost records is unknown: the rest of the file counts as one.
                    yield Record(number + 1, b"", f"cut short or damaged ({error})")
                    return
                if header is None and cells:
                    header = _checked_header(piece.file.path, cells)
                elif header is not None and cells:
                    number += 1
                    yield self._record(number, header, cells)

    def _record(self, number: int, header: Sequence[str], cells: Sequence[str]) -> Record:
        if len(cells) != len(header):
            return Record(number, b"", f"has {len(cells)} cells, and the header has {len(header)}")
        content, problem = content_of(dict(zip(header, cells, strict=True)), self.text_field)
        return Record(number, content, "not UTF-8" if "surrogate" in problem else problem)


def _checked_header(path: str, cells: list[str]) -> list[str]:
    """Returns the names of the columns; raises ConfigError for one that is empty or stated
    twice.
    """
    [(name, count)] = Counter(cells).most_common(1)
    if count > 1 or "" in cells:
        problem = f"names {shown(repr(name))} twice" if count > 1 else "has a column without a name"
        raise ConfigError(
            f"{path}: the header, its first line, {problem}; works: a name for each column"
        )
    return cells


CSV = FileFormat(
    lambda record_format, text_field: Table(",", text_field),
    re.compile(rf"\.csv{SHARD}(\.gz)?$"),
    ".csv or .csv.gz",
    has_records=True,
)
TSV = FileFormat(
    lambda record_format, text_field: Table("\t", text_field),
    re.compile(rf"\.tsv{SHARD}(\.gz)?$"),
    ".tsv or .tsv.gz",
    has_records=True,
)
